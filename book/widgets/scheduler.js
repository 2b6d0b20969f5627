// Continuous batching, step by step: requests that one adds, a token budget, chunks, and slots.
"use strict";

(window.widgets = window.widgets || {}).scheduler = (live) => {
  const { make, colours } = window.widgets;
  const SLOTS = 3, STEPS = 24;
  const continuous = make("input", { type: "checkbox", checked: true });
  const budget = make("input", { type: "range", min: 4, max: 16, step: 4, value: 8 });
  let waiting, running, history, count, step;

  const reset = () => {
    [waiting, running, history, count, step] = [[], Array(SLOTS).fill(null), [], 0, 0];
    add(6, 2); add(3, 6); add(2, 3); add(4, 2);
  };

  const add = (prompt, answer) => {
    waiting.push({ name: String.fromCharCode(65 + count % 26), colour: colours[count % colours.length], prompt, left: answer, computed: 0 });
    count += 1;
  };

  const advance = () => {
    let room = Number(budget.value);
    const shares = Array(SLOTS).fill(null);
    // Decodes first, then prompts that run already, then those that wait, in their order.
    const order = running.map((request, slot) => [request, slot]).filter(([request]) => request);
    order.sort(([a], [b]) => Number(a.computed < a.prompt) - Number(b.computed < b.prompt));
    const run = (request, slot) => {
      const wanted = Math.max(1, request.prompt - request.computed);
      const tokens = Math.min(wanted, room);
      if (!tokens) return;
      room -= tokens;
      shares[slot] = { name: request.name, colour: request.colour, tokens };
      request.computed += tokens;
      if (request.computed >= request.prompt) request.left -= 1;
    };
    order.forEach(([request, slot]) => run(request, slot));
    const mayAdmit = continuous.checked || running.every((request) => !request);
    for (let slot = 0; slot < SLOTS && mayAdmit; slot++) {
      if (!running[slot] && waiting.length && room) run(running[slot] = waiting.shift(), slot);
    }
    running = running.map((request) => (request && request.left > 0 ? request : null));
    history.push(shares);
    step += 1;
  };

  const button = (words, act) => make("button", { textContent: words, onclick: () => { act(); draw(); } });

  const draw = () => {
    const shown = history.slice(-STEPS);
    const lines = Array.from({ length: SLOTS }, (_, slot) => {
      const line = make("div", { className: "cells" }, `slot ${slot}`);
      for (const shares of shown) {
        const share = shares[slot];
        const cell = make("span", { className: "cell", textContent: share ? share.name + (share.tokens > 1 ? share.tokens : "") : "." });
        if (share) Object.assign(cell.style, { background: share.colour, color: "#ffffff" });
        line.append(cell);
      }
      line.style.flexWrap = "nowrap";
      return line;
    });
    const cells = history.flat(), used = cells.filter(Boolean).length;
    const queue = waiting.map((request) => `${request.name} (prompt ${request.prompt}, answer ${request.left})`).join(", ");
    live.replaceChildren(
      make("label", {}, continuous, " continuous batching"),
      make("label", {}, "token budget ", budget, ` ${budget.value}`),
      button("step", advance), button("add a short request", () => add(2, 2)),
      button("add a long prompt", () => add(12, 2)), button("add a long answer", () => add(2, 9)),
      button("start again", reset), ...lines,
      make("output", { textContent: `Step ${step}. Waiting: ${queue || "none"}. ` + (cells.length ? `Slots in use: ${Math.round(100 * used / cells.length)} %. A number beside a letter: tokens of its prompt in that step.` : "") }));
  };
  budget.addEventListener("input", () => draw());
  reset();
  draw();
};
