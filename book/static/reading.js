// What helps reading a long page: a switch that opens all folded code, contents that follow.
addEventListener("DOMContentLoaded", () => {
  for (const line of document.querySelectorAll(".open-folds")) {
    const button = line.querySelector("button");
    const folds = () => document.querySelectorAll("details.above-input, details.shown-source");
    button.onclick = () => {
      const open = button.ariaPressed !== "true";
      button.ariaPressed = String(open);
      for (const fold of folds()) fold.open = open;
      // Where the reader was is where the reader stays.
      button.scrollIntoView({ block: "nearest" });
    };
    line.hidden = false;
  }

  // The form for a wrong number is told the section that the reader is in.
  const report = document.querySelector(".report-number a");
  report?.addEventListener("click", () => {
    const passed = [...document.querySelectorAll(".bd-article section[id]")].filter(
      (section) => section.getBoundingClientRect().top < innerHeight / 2,
    );
    const last = location.hash || (passed.length ? `#${passed.at(-1).id}` : "");
    report.href = report.href.replace(/Section%3A.*?%0A/, `Section%3A+${encodeURIComponent(last)}%0A`);
  });

  // Other versions of the site: who presses the button asks for their list.
  const versions = document.querySelector(".versions");
  if (versions && location.protocol.startsWith("http")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Other versions";
    const said = document.createElement("span");
    said.setAttribute("role", "status");
    versions.append(" ", button, said);
    button.onclick = async () => {
      button.remove();
      const root = new URL(document.documentElement.dataset.content_root || "./", location.href);
      const top = new URL(root.href.replace(/versions\/[^/]+\/$/, ""));
      const answer = await fetch(new URL("versions.json", top)).catch(() => null);
      const listed = answer?.ok ? await answer.json() : [];
      const others = listed.filter(({ path }) => new URL(path, top).href !== root.href);
      said.textContent = others.length ? "others: " : "is the only one here.";
      for (const { name, path } of others) {
        const link = document.createElement("a");
        link.href = new URL(path, top).href;
        link.textContent = name;
        said.append(link, " ");
      }
    };
  }

  // The theme marks a heading in the contents when it comes by, and misses it when the reader jumps.
  const contents = document.querySelector("#pst-page-toc-nav");
  const links = [...(contents?.querySelectorAll("a[href^='#']") ?? [])];
  const follow = () => {
    const passed = (link) => {
      const place = document.getElementById(decodeURIComponent(link.hash.slice(1)));
      return place && place.getBoundingClientRect().top < innerHeight * 0.15;
    };
    const now = links.findLast(passed);
    for (const link of links) {
      link.classList.toggle("active", link === now);
      if (link === now) link.ariaCurrent = "true";
      else link.removeAttribute("aria-current");
    }
    for (const entry of contents.querySelectorAll(".toc-entry")) {
      entry.classList.toggle("active", Boolean(now) && entry.contains(now));
    }
    const box = now && contents.closest(".bd-sidebar-secondary");
    const used = box?.matches(":hover, :focus-within"); // what the reader uses stays where it is
    if (box && !used && box.scrollHeight > box.clientHeight) now.scrollIntoView({ block: "nearest" });
  };
  let waiting = 0;
  if (links.length) {
    addEventListener("scroll", () => {
      clearTimeout(waiting);
      waiting = setTimeout(follow, 100); // after the theme
    }, { passive: true });
  }
});
