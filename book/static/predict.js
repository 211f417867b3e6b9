// Predict first: what follows the question waits for a number, or for "Show".
"use strict";
for (const box of document.querySelectorAll(".predict:not(.predict-live)")) {
  const value = Number(box.dataset.value);
  const page = location.pathname.split("/").slice(-2).join("/");
  const key = `predict:${page}#${box.id}`;
  const kept = { // a browser may keep nothing, as for files on a disk
    get: () => { try { return localStorage.getItem(key); } catch { return null; } },
    set: (text) => { try { localStorage.setItem(key, text); } catch { /* then it is forgotten */ } },
    forget: () => { try { localStorage.removeItem(key); } catch { /* it was not kept */ } },
  };
  const make = (parent, tag, name, text = "") =>
    parent.appendChild(Object.assign(document.createElement(tag), { className: name, textContent: text }));
  const form = make(box, "form", "predict-form");
  const label = make(form, "label", "", "Your number ");
  const field = make(label, "input", "");
  field.type = "text";
  field.inputMode = "decimal";
  field.autocomplete = "off";
  const compare = make(form, "button", "", "Compare");
  const show = make(form, "button", "", "Show");
  show.type = "button";
  const said = make(form, "p", "predict-said");
  said.setAttribute("role", "status");
  box.insertBefore(form, box.querySelector(".predict-answer"));
  box.classList.add("predict-live");

  const open = (is) => {
    box.classList.toggle("predict-open", is);
    show.textContent = is ? "Hide, and try again" : "Show";
  };
  const judge = (given) => {
    const [a, b] = [Math.abs(given), Math.abs(value)];
    const how = given === value ? "exactly."
      : given * value <= 0 ? "of another sign, or nothing."
      : Math.abs(a / b - 1) <= 0.05 ? "less than 5 % off."
      : a < b ? `${(b / a).toPrecision(2)} times what you said.`
      : `you said ${(a / b).toPrecision(2)} times as much.`;
    said.textContent = `You said ${given}, and it is ${value}: ${how}`;
    open(true);
  };
  form.onsubmit = (event) => {
    event.preventDefault();
    const text = field.value.trim().replace(",", ".");
    const given = Number(text);
    if (text === "" || !Number.isFinite(given)) {
      said.textContent = "Write a number, as 12.5.";
      field.focus();
      return;
    }
    kept.set(text);
    judge(given);
  };
  show.onclick = () => {
    if (box.classList.contains("predict-open")) {
      kept.forget();
      field.value = said.textContent = "";
      open(false);
      field.focus();
    } else {
      kept.set("");
      said.textContent = `It is ${value}.`;
      open(true);
    }
  };
  const before = kept.get();
  if (before) {
    field.value = before;
    judge(Number(before));
  } else if (before === "") open(true);
}
