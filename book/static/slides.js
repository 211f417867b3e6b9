// Starts a deck: in the colours that the site's pages have, formulas set before slides are hidden.
"use strict";
const asked = new URLSearchParams(location.search);
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.mode; } catch { /* files may keep nothing */ }
const colour = () => {
  const mode = /^(light|dark)$/.test(chosen) ? chosen : dark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = asked.has("print-pdf") ? "light" : mode;
};
colour();
dark.addEventListener("change", colour);
// A deck of a path has the slides of the sections that the path reads.
const on = `section[data-paths~="${CSS.escape(asked.get("path") ?? "")}"]`;
if (document.querySelector(on)) {
  for (const one of document.querySelectorAll(`.slides section:not(${on})`)) one.remove();
}
const start = () => Reveal.initialize({
  width: 1280,
  height: 720,
  margin: 0,
  center: false,
  display: "flex",
  hash: true,
  slideNumber: "c/t",
  transition: "none",
  backgroundTransition: "none",
  controls: false,
  defaultTiming: 60,
  pdfMaxPagesPerSlide: 1,
  showNotes: asked.has("notes") ? "separate-page" : false,
  plugins: [RevealNotes],
});
window.ready = Promise.resolve(window.setMaths?.()).then(start);
