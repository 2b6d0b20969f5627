// A page that was opened from a folder may start no worker: the search's runs in a hidden frame.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, page = this.frame.contentDocument;
      const load = (source) => new Promise((loaded, failed) => {
        const script = page.createElement("script");
        Object.assign(script, { src: source, onload: loaded, onerror: failed });
        page.body.append(script);
      });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(address);
    }

    postMessage(data) {
      const message = () =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(message);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
