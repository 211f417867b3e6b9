// Calculators: forms that the course's own Python answers, in the reader's browser, when asked.
// Python comes as a string, in a script (see book/_ext/calculator.py), and runs in a worker.
"use strict";
(() => {
  const { src, dataset } = document.currentScript;
  let coming = null;
  const python = () =>
    (coming ??= new Promise((done, failed) => {
      const script = Object.assign(document.createElement("script"), { src: new URL(dataset.python, src) });
      script.onload = () => done(URL.createObjectURL(new Blob([self.coursePython], { type: "text/javascript" })));
      script.onerror = () => {
        coming = null;
        script.remove();
        failed(new Error("Python could not be loaded: is there a network?"));
      };
      document.head.append(script);
    }));

  const add = (parent, tag, given = {}) => parent.appendChild(Object.assign(document.createElement(tag), given));

  const table = (box, { head, rows, summary }) => {
    const all = add(add(box, "div", { className: "shown-table" }), "table");
    add(all, "caption", { textContent: summary });
    const top = add(add(all, "thead"), "tr");
    for (const word of head) add(top, "th", { scope: "col", textContent: word });
    const body = add(all, "tbody");
    for (const [name, ...values] of rows) {
      const row = add(body, "tr");
      add(row, "th", { scope: "row", textContent: name });
      for (const value of values) add(row, "td", { textContent: value });
    }
  };

  // A row for each stage, a box for each pass, as `shardlab.pipeline.draw_timelines` has them: the corners
  // of a backward are cut at the left, a backward of weights is low, a whole one has it as its foot.
  const PASS_SECONDS = 0.005; // to schedule a micro-batch on a stage: 3 to 13 ms, measured on idle and on busy cores
  const TALL = 26, STEP = 31, LEFT = 58, CUT = 4, LOW = 0.66, MOST = 5000;
  const WORDS = { F: "forward", B: "backward", I: "backward of the input", W: "backward of the weights" };
  const draw = (parent, tag, given, words) => {
    const one = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
    for (const [name, value] of Object.entries(given)) one.setAttribute(name, value);
    if (words !== undefined) one.textContent = words;
    return one;
  };
  const sheet = (box, wide, high, label) => {
    const frame = add(box, "div", { className: "inline-svg" });
    const svg = draw(frame, "svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img" });
    svg.style.maxWidth = "none";
    svg.setAttribute("aria-label", label);
    return svg;
  };
  const picture = (box, { spans, chunks, shapes, wide: width, high: height }, summary) => {
    if (shapes) {
      const svg = sheet(box, width, height, summary);
      for (const shape of shapes) draw(svg, ...shape);
      return;
    }
    const all = spans.flat();
    if (all.length > MOST) {
      add(box, "p", { textContent: `A picture of ${all.length} passes would be too large: ${MOST} can be drawn.` });
      return;
    }
    const first = Math.min(...all.map((span) => span.begin));
    const end = Math.max(...all.map((span) => span.end)) - first || 1;
    const cost = Math.max(...spans.map((row) => row.at(-1).end - row[0].begin));
    const shortest = Math.min(...all.map((span) => span.end - span.begin).filter((long) => long > 0));
    const room = Math.max(240, box.clientWidth - LEFT - 4);
    const unit = Math.min(Math.max(room, (12 * end) / shortest), Math.max(room, 6000)) / end;
    const wide = Math.ceil(LEFT + end * unit + 2), high = spans.length * STEP + 18;
    const svg = sheet(box, wide, high, `Timeline, a row for each stage and a box for each pass. ${summary}`);
    const path = (corners, kind, chunk) => {
      const shape = draw(svg, "path", { d: `M${corners.map((at) => at.map((x) => x.toFixed(1)).join(" ")).join("L")}Z` });
      shape.setAttribute("class", `pass-${kind}`);
      shape.style.setProperty("--late", `${chunks > 1 ? (60 * chunk) / (chunks - 1) : 0}%`);
    };
    spans.forEach((row, stage) => {
      const top = stage * STEP;
      draw(svg, "text", { x: LEFT - 6, y: top + 17, "text-anchor": "end" }, `stage ${stage}`);
      // As long as the step costs: a stage that begins late ends late, or has waited for so long.
      const begins = Math.min(row[0].begin, Math.max(first, row.at(-1).end - cost)) - first;
      draw(svg, "rect", { class: "pass-idle", x: LEFT + begins * unit, y: top, width: cost * unit, height: TALL });
      for (const { kind, microbatch, chunk, begin, end } of row) {
        const x = LEFT + (begin - first) * unit, right = LEFT + (end - first) * unit, foot = top + TALL;
        const cut = Math.min(CUT, (right - x) / 3), y = kind === "W" ? top + (1 - LOW) * TALL : top;
        if (kind === "F" || kind === "W") path([[x, y], [right, y], [right, foot], [x, foot]], kind, chunk);
        else path([[x + cut, y], [right, y], [right, foot], [x + cut, foot], [x, foot - cut], [x, y + cut]], kind, chunk);
        if (kind === "B") path([[right, foot - cut], [right, foot], [x + cut, foot], [x, foot - cut]], "W", chunk);
        const size = Math.min(12, (right - x) / (0.65 * String(microbatch).length));
        if (size < 7) continue;
        const middle = { x: (x + right) / 2, y: (y + foot) / 2 + size * 0.35, "text-anchor": "middle", style: `font-size:${size}px` };
        draw(svg, "text", { ...middle, class: "pass-number" }, microbatch);
      }
    });
    draw(svg, "text", { x: LEFT, y: high - 4 }, "0");
    draw(svg, "text", { x: wide - 2, y: high - 4, "text-anchor": "end" }, `${+end.toPrecision(5)}`);
    const key = add(box, "p", { className: "calculator-key" });
    for (const [kind, words] of Object.entries(WORDS)) {
      if (!all.some((span) => span.kind === kind)) continue;
      add(key, "span", { className: `pass-${kind}` });
      key.append(` ${words} `);
    }
    add(key, "span", { className: "pass-idle" });
    key.append(` idle${chunks > 1 ? "; lighter: later parts" : ""}`);
  };

  for (const form of document.querySelectorAll("form.calculator:not(.calculator-live)")) {
    form.classList.add("calculator-live");
    form.querySelector(".calculator-fields").hidden = false;
    const bar = add(form, "p", { className: "calculator-bar" });
    const go = add(bar, "button", { className: "calculator-button", textContent: "Calculate" });
    const stop = add(bar, "button", { className: "calculator-button", textContent: "Stop", type: "button", hidden: true });
    const status = add(form, "p", { className: "calculator-status", role: "status" });
    const wrong = add(form, "p", { className: "calculator-wrong", role: "alert" });
    const result = add(form, "div", { className: "calculator-result" });
    const fields = [...form.querySelectorAll("[data-name]")];
    const terminal = form.querySelector(".calculator-command");
    form.append(terminal); // below what it prints
    let worker = null, turn = 0;

    const end = () => {
      worker?.terminate();
      worker = null;
    };
    const ask = async (given) => {
      const address = await python();
      return new Promise((done, failed) => {
        worker ??= new Worker(address);
        worker.onmessage = (event) => done(JSON.parse(event.data));
        worker.onerror = (event) => {
          event.preventDefault();
          end();
          failed(new Error(`Python stopped: ${event.message}`));
        };
        worker.postMessage(JSON.stringify({ kind: form.dataset.kind, given }));
      });
    };
    const busy = (now) => {
      if (!now && document.activeElement === stop) go.focus();
      stop.hidden = !now;
      result.ariaBusy = String(now);
    };
    const refuse = (words) => {
      result.replaceChildren();
      status.textContent = "";
      wrong.textContent = words;
      const field = fields.find((field) => field.dataset.name === words.split("=")[0]);
      if (!field) return;
      field.ariaInvalid = "true";
      field.focus();
    };

    const show = (found) => {
      terminal.textContent = found.command;
      if (found.error) return refuse(found.error);
      result.replaceChildren();
      status.textContent = found.summary;
      if (found.picture) picture(result, found.picture, found.summary);
      table(result, found);
      dispatchEvent(new Event("resize")); // who asks which boxes scroll asks again
    };
    show(JSON.parse(form.querySelector("script").textContent)); // of the values at the start

    form.onsubmit = async (event) => {
      event.preventDefault();
      if (!stop.hidden) return; // it calculates
      const given = {};
      for (const field of fields) {
        field.removeAttribute("aria-invalid");
        const value = field.value.trim();
        if (value !== field.dataset.default) given[field.dataset.name] = field.matches("select") && value === "yes" ? true : value;
      }
      const mine = ++turn;
      wrong.textContent = "";
      const seconds = Math.round(((given.stages * given.microbatches * (given.chunks || 1)) || 0) * PASS_SECONDS);
      const long = seconds > 5 ? ` A schedule of this length takes some ${seconds} s.` : "";
      status.textContent = (coming ? "Calculating …" : "Loading Python, half a megabyte …") + long;
      busy(true);
      try {
        const found = await ask(given);
        if (mine === turn) show(found);
      } catch (error) {
        if (mine === turn) refuse(error.message);
      } finally {
        if (mine === turn) busy(false);
      }
    };
    stop.onclick = () => {
      turn += 1;
      end();
      busy(false);
      status.textContent = "Stopped.";
    };
  }
})();
