// What stands between a page and readers who hear it or use the keyboard alone: markup of the theme,
// of Sphinx and of docutils that the book cannot choose.
addEventListener("DOMContentLoaded", () => {
  const say = (which, given) => document.querySelectorAll(which).forEach((one) => Object.assign(one, given));
  say("#pst-search-dialog", { ariaLabel: "Search" });
  say("dialog[id$=sidebar-modal]", { ariaLabel: "Contents" });
  say("#pst-primary-sidebar", { role: "complementary", ariaLabel: "Book" });
  say("[role=doc-biblioentry]", { role: "listitem" }); // ARIA 1.2 gives that role up
  say("img.logo__image", { alt: "" }); // the title beside it says the same
  for (const one of document.querySelectorAll("summary[aria-label]")) one.removeAttribute("aria-label");

  // A table that does not fit a phone becomes a list, whose entries name their columns (course.css).
  if (!matchMedia("(max-width: 540px)").matches) return;
  for (const table of document.querySelectorAll(".bd-article table:has(thead):not(.highlighttable)")) {
    if (table.scrollWidth <= table.parentElement.clientWidth) continue;
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => (cell.dataset.head = heads[column] ?? ""));
    }
    table.classList.add("narrows");
  }
});

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
})();
