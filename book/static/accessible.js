// A box that scrolls sideways gets a place in the tab order, and a name; one that does not, neither.
(() => {
  const names = {
    ".inline-svg, .shown-figure": "Picture",
    ".shown-table, .pst-scrollable-table-container": "Table",
    "div.math, mjx-container[display=true]": "Formula",
    ".bd-article pre, .highlighttable": "Code",
  };
  const update = () => {
    for (const [boxes, name] of Object.entries(names)) {
      for (const box of document.querySelectorAll(boxes)) {
        const scrolls = box.scrollWidth > box.clientWidth + 1;
        if (scrolls === (box.tabIndex === 0)) continue;
        if (scrolls) {
          box.tabIndex = 0;
          box.role = "group";
          box.ariaLabel = name + ", scrolls sideways";
        } else {
          for (const word of ["tabindex", "role", "aria-label"]) box.removeAttribute(word);
        }
      }
    }
  };
  let waiting;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 200);
  };
  addEventListener("load", soon);
  addEventListener("resize", soon);
  document.addEventListener("toggle", soon, true); // what was folded has no width before
  document.addEventListener("click", soon);
  // What was far from the screen had no layout before (class afar).
  document.addEventListener("contentvisibilityautostatechange", soon, true);
})();
