/* Search from files without a server.
 *
 * Browsers start no worker from a file. This replacement runs the script of a worker in a hidden frame. It takes the
 * place of the script that the offline plugin of Material for MkDocs would load from a server; the plugin looks for
 * "iframe-worker" in the name.
 */
(function () {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      this.ready = new Promise((resolve) => (this.frame.onload = resolve));
      inside.document.open();
      inside.document.write(`<!doctype html><html><body><script>
        postMessage = (data) => parent.dispatchEvent(new MessageEvent("frame-worker", { data }));
        importScripts = (...urls) =>
          urls.reduce(
            (before, url) =>
              before.then(
                () =>
                  new Promise((resolve, reject) => {
                    const script = document.createElement("script");
                    script.src = url;
                    script.onload = resolve;
                    script.onerror = reject;
                    document.body.appendChild(script);
                  })
              ),
            Promise.resolve()
          );
      <\/script><script src="${url}"><\/script></body></html>`);
      inside.document.close();
      addEventListener("frame-worker", (event) => {
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.Worker = FrameWorker;
})();
