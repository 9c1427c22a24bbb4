// From file:// a browser starts no workers. The search's runs in a hidden frame instead, which needs no server, and fetches
// nothing from elsewhere. It stands in for a module of this kind that the generator names on the web.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    onmessage = null;
    onerror = null;

    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this.hand("message", new MessageEvent("message", { data })));
      inner.importScripts = (...urls) => urls.reduce((done, one) => done.then(() => this.load(one)), Promise.resolve());
      this.ready = this.load(url);
      this.ready.catch(() => this.hand("error", new Event("error")));
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        script.onerror = reject;
        this.frame.contentDocument.documentElement.append(script);
      });
    }

    hand(name, event) {
      if (this["on" + name]) this["on" + name](event);
      this.dispatchEvent(event);
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
