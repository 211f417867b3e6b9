// Pictures in steps: one at a time. Without this script all steps stand one below the other.
"use strict";
for (const box of document.querySelectorAll(".steps:not(.steps-live)")) {
  const list = box.querySelector("ol");
  const steps = [...list.children];
  const add = (parent, tag, name, text) =>
    parent.appendChild(Object.assign(document.createElement(tag), { className: name, textContent: text }));
  const bar = add(box, "div", "steps-bar", "");
  const back = add(bar, "button", "steps-button", "Previous");
  const count = add(bar, "span", "steps-count", "");
  const next = add(bar, "button", "steps-button", "Next");
  let now = 0;
  const go = (to) => {
    now = Math.min(Math.max(to, 0), steps.length - 1);
    steps.forEach((step, i) => step.classList.toggle("steps-now", i === now));
    // Not `disabled`: a button that holds the focus would lose it.
    back.ariaDisabled = String(now === 0);
    next.ariaDisabled = String(now === steps.length - 1);
    count.textContent = `${now + 1} of ${steps.length}`;
  };
  for (const button of [back, next]) button.type = "button";
  back.onclick = () => go(now - 1);
  next.onclick = () => go(now + 1);
  bar.onkeydown = (event) => {
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to);
  };
  go(0);
  box.classList.add("steps-live");
  box.insertBefore(bar, list);
  // Who cannot see the step change hears it: its number, its picture's description, its sentence.
  count.ariaLive = list.ariaLive = "polite";
}
