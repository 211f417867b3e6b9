// What a page holds far from its screen has no layout while it loads (class `afar`: see slim.py).
// Afterwards it gets one, piece by piece in spare moments: whoever prints or copies has all of it.
addEventListener("load", () => {
  const spare = window.requestIdleCallback ?? setTimeout;
  const left = [...document.querySelectorAll(".afar")];
  const next = () => {
    left.shift()?.classList.remove("afar");
    if (left.length) spare(next);
  };
  spare(next);
});
