// SPDX-License-Identifier: Apache-2.0
// Searching runs in a worker, which browsers do not start in pages read from disk. There, the
// worker's script runs in a frame instead. (The theme knows by the file's name that it is there.)
if (location.protocol === 'file:') {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement('iframe');
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const answer = data => this.dispatchEvent(new MessageEvent('message', {data}));
      inside.postMessage = data => setTimeout(answer, 0, data);
      this.ask = data => inside.dispatchEvent(new inside.MessageEvent('message', {data}));
      const script = frame.contentDocument.createElement('script');
      this.loaded = new Promise(resolve => script.addEventListener('load', resolve));
      script.src = url;
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.ask(data));
    }

    terminate() {}
  };
}
