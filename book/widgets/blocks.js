// A pool of blocks and the tables of sequences: add tokens, fork, find a prefix, run out of memory.
"use strict";

(window.widgets = window.widgets || {}).blocks = (live) => {
  const { make, colours } = window.widgets;
  const SIZE = 4, COUNT = 8;
  let free, references, tables, names, said;

  const reset = () => {
    free = [...Array(COUNT).keys()];
    references = Array(COUNT).fill(0);
    tables = new Map(); // name -> { blocks, length }, in the order of arrival
    names = "ABCDEF".split("");
    said = "Eight blocks of four tokens, all free.";
  };

  const give = (block) => {
    references[block] -= 1;
    if (references[block] === 0) free.push(block);
  };

  const drop = (name) => {
    tables.get(name).blocks.forEach(give);
    tables.delete(name);
    names.unshift(name);
    names.sort();
  };

  // A block for `name`; the sequence that came last gives way when none is left.
  const take = (name) => {
    let preempted = "";
    while (!free.length) {
      const last = [...tables.keys()].pop();
      preempted += ` No block is left: ${last} came last, is preempted, and gives its blocks back.`;
      drop(last);
      if (last === name) return [-1, preempted];
    }
    const block = free.shift();
    references[block] = 1;
    return [block, preempted];
  };

  const admit = () => {
    const name = names[0];
    if (!name || free.length < 2) return (said = "A prompt of 6 tokens needs two blocks: it waits.");
    names.shift();
    tables.set(name, { blocks: [take(name)[0], take(name)[0]], length: 6 });
    said = `${name}: a prompt of 6 tokens takes 2 blocks; the second has room for 2 more tokens.`;
  };

  const token = (name) => {
    const table = tables.get(name);
    const at = Math.floor(table.length / SIZE);
    said = `${name}: position ${table.length}`;
    if (at === table.blocks.length) {
      const [block, preempted] = take(name);
      if (block < 0) return (said += preempted);
      table.blocks.push(block);
      said += ` opens block ${block}.${preempted}`;
    } else if (references[table.blocks[at]] > 1) {
      const old = table.blocks[at];
      const [block, preempted] = take(name);
      if (block < 0) return (said += preempted);
      give(old);
      table.blocks[at] = block;
      said += `: block ${old} is shared, so it is copied to block ${block} first (copy-on-write).${preempted}`;
    } else said += ".";
    const block = table.blocks[at];
    said += ` Slot ${block} * ${SIZE} + ${table.length % SIZE} = ${block * SIZE + table.length % SIZE}.`;
    table.length += 1;
  };

  const fork = (name) => {
    const child = names.shift();
    if (!child) return (said = "No name is left: finish a sequence first.");
    const { blocks, length } = tables.get(name);
    blocks.forEach((block) => (references[block] += 1));
    tables.set(child, { blocks: [...blocks], length });
    said = `${child} is a fork of ${name}: the same ${blocks.length} blocks, counted twice; nothing is copied yet.`;
  };

  const button = (words, act) => make("button", { textContent: words, onclick: () => { act(); draw(); } });

  const draw = () => {
    const owners = (block) => [...tables].filter(([, table]) => table.blocks.includes(block)).map(([name]) => name);
    const pool = make("div", { className: "cells" }, "pool");
    for (let block = 0; block < COUNT; block++) {
      const by = owners(block);
      const cell = make("span", { className: "cell", textContent: by.length ? `${block}: ${by.join("")}` : `${block}` });
      if (by.length) {
        cell.style.background = colours["ABCDEF".indexOf(by[0])];
        cell.style.color = "#ffffff";
      }
      pool.append(cell);
    }
    const lines = [...tables].map(([name, table]) => make("div", { className: "cells" },
      make("b", { textContent: name }), ` ${table.length} tokens in blocks ${table.blocks.join(", ")} `,
      button(`${name}: a token`, () => token(name)), button(`fork ${name}`, () => fork(name)),
      button(`${name} ends`, () => { drop(name); said = `${name} ended: blocks whose count is 0 are free.`; })));
    live.replaceChildren(pool, ...lines,
      button("a new prompt of 6", admit), button("start again", reset),
      make("output", { textContent: said }));
  };
  reset();
  draw();
};
