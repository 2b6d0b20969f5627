// The roofline of a machine, and where a decode step of some rows lies on it.
"use strict";

(window.widgets = window.widgets || {}).roofline = (live) => {
  const { make, colours } = window.widgets;
  // Weights that a token reads, and numbers of keys and values of a token.
  const models = {
    "GPT-2 124M": { weights: 123532032, cached: 18432, pairs: 36864 },
    "SmolLM2 135M": { weights: 134.5e6, cached: 11520, pairs: 69120 },
    "Llama 3.1 8B": { weights: 7.505e9, cached: 65536, pairs: 524288 },
  };
  // GB/s, and GFLOP/s in float32 and bfloat16.
  const machines = {
    "round numbers: 40 GB/s, 200 GFLOP/s": [40, 200, 400],
    "a GPU: 3,000 GB/s, 800,000 GFLOP/s in bfloat16": [3000, 60000, 800000],
  };
  const choice = (names) => {
    const select = make("select");
    for (const name of Object.keys(names)) select.append(make("option", { textContent: name }));
    return select;
  };
  const model = choice(models), machine = choice(machines);
  const dtype = choice({ float32: 4, bfloat16: 2 });
  const rows = make("input", { type: "range", min: 0, max: 10, step: 1, value: 0 });
  const context = make("input", { type: "range", min: 0, max: 1000, step: 50, value: 0 });
  const words = make("output"), rowWords = make("span"), contextWords = make("span");
  const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  chart.setAttribute("viewBox", "0 0 560 300");
  chart.setAttribute("role", "img");
  live.append(
    make("label", {}, "model ", model), make("label", {}, "dtype ", dtype),
    make("label", {}, "machine ", machine),
    make("label", {}, "rows ", rows, rowWords), make("label", {}, "tokens before ", context, contextWords),
    chart, words,
  );

  const shape = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    chart.append(element);
  };

  const draw = () => {
    const of = models[model.value], size = dtype.value === "float32" ? 4 : 2;
    const [bandwidth, single, half] = machines[machine.value];
    const peak = size === 4 ? single : half;
    const count = 2 ** Number(rows.value), before = Number(context.value);
    const flop = count * (2 * of.weights + of.pairs * before) / 1e9;
    const bytes = size * (of.weights + count * before * of.cached) / 1e9;
    const reading = 1e3 * bytes / bandwidth, computing = 1e3 * flop / peak;
    const intensity = flop / bytes, rate = Math.min(peak, intensity * bandwidth);
    const corner = peak / bandwidth;
    const low = Math.min(0.25, corner / 16), high = Math.max(1024, corner * 4);
    const x = (value) => 50 + 490 * Math.log(value / low) / Math.log(high / low);
    const y = (value) => 260 - 230 * Math.log(value / (low * bandwidth)) / Math.log(peak * 1.6 / (low * bandwidth));
    chart.replaceChildren();
    shape("line", { x1: 50, y1: 260, x2: 540, y2: 260, stroke: "currentColor" });
    shape("line", { x1: 50, y1: 260, x2: 50, y2: 20, stroke: "currentColor" });
    const roof = [[low, low * bandwidth], [corner, peak], [high, peak]];
    const points = roof.map(([at, most]) => `${x(at)},${y(most)}`).join(" ");
    shape("polyline", { points, fill: "none", stroke: colours[0], "stroke-width": 2.5 });
    shape("text", { x: 535, y: y(peak) - 6, "text-anchor": "end", fill: "currentColor", "font-size": 12 }, `${peak.toLocaleString("en")} GFLOP/s`);
    shape("text", { x: x(corner), y: 275, "text-anchor": "middle", fill: "currentColor", "font-size": 12 }, corner.toPrecision(3));
    shape("text", { x: 295, y: 294, "text-anchor": "middle", fill: "currentColor", "font-size": 12 }, "operations per byte read");
    shape("circle", { cx: x(Math.max(low, Math.min(high, intensity))), cy: y(rate), r: 6, fill: colours[1] });
    rowWords.textContent = ` ${count}`;
    contextWords.textContent = ` ${before}`;
    const bound = reading >= computing ? "memory" : "arithmetic";
    const speed = 1e3 * count / Math.max(reading, computing);
    words.textContent = `Reading ${reading.toPrecision(3)} ms, computing ${computing.toPrecision(3)} ms: ` +
      `bound by ${bound}. At most ${speed.toFixed(speed < 10 ? 1 : 0)} tok/s, ` +
      `${intensity.toPrecision(3)} operations a byte; the corner is at ${corner.toPrecision(3)}.`;
    chart.setAttribute("aria-label", words.textContent);
  };
  for (const input of [model, dtype, machine, rows, context]) input.addEventListener("input", draw);
  draw();
};
