// Puts each widget below its picture, which the text explains. What widgets share.
"use strict";

window.widgets = Object.assign(window.widgets || {}, {
  // An element with properties and children.
  make(name, properties = {}, ...children) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  },

  colours: ["#6f3f9a", "#c8501e", "#3aa6a0", "#e9b824", "#5b79c9", "#a04468"],
});

document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll("[data-widget]")) {
    const draw = window.widgets[place.dataset.widget];
    if (!draw) continue;
    const live = window.widgets.make("div", { className: "live" });
    draw(live);
    place.append(live);
  }
});
