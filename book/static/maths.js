// Sets mathematics when it comes near the screen; the rest in spare moments, once the reader has
// done something, or at once where the address has ?print. `setMaths()` sets all of it.
(() => {
  const engineAddress = new URL("mathjax/startup.js", document.currentScript.src);
  const waiting = new Set();
  let engine = null;
  let queue = Promise.resolve();

  const load = () =>
    (engine ??= new Promise((loaded, failed) => {
      window.MathJax = {
        loader: { load: ["input/tex", "output/chtml", "a11y/assistive-mml"] }, // no menu: 100 kB
        startup: {
          typeset: false,
          ready() {
            MathJax.startup.defaultReady();
            MathJax.startup.promise.then(loaded, failed);
          },
        },
      };
      const script = document.createElement("script");
      script.src = engineAddress;
      script.onerror = failed;
      document.head.append(script);
    }));

  const set = (elements) => {
    const fresh = elements.filter((element) => waiting.delete(element));
    if (fresh.length) {
      queue = queue.then(load).then(() => MathJax.typesetPromise(fresh))
        .then(() => dispatchEvent(new Event("resize"))); // a formula may scroll now (accessible.js)
      fresh.forEach((element) => watch.unobserve(element));
    }
    return queue;
  };

  const watch = new IntersectionObserver(
    (entries) => set(entries.filter((e) => e.isIntersecting).map((e) => e.target)),
    { rootMargin: "600px 0px" },
  );

  const pause = () =>
    new Promise((done) => (window.requestIdleCallback ?? setTimeout)(done, { timeout: 2000 }));

  const rest = async () => {
    while (waiting.size) {
      await pause();
      await set([...waiting].slice(0, 8));
    }
  };

  const start = () => {
    document.querySelectorAll(".math").forEach((element) => {
      waiting.add(element);
      watch.observe(element);
    });
    const signs = ["scroll", "wheel", "pointermove", "pointerdown", "touchstart", "keydown"];
    signs.forEach((sign) => addEventListener(sign, rest, { passive: true, once: true }));
    if (new URLSearchParams(location.search).has("print")) window.setMaths(); // Sphinx rewrites it as ?print=
    addEventListener("beforeprint", () => window.MathJax?.typeset?.([...waiting]));
  };

  window.setMaths = () => set([...waiting]);
  document.readyState === "loading" ? addEventListener("DOMContentLoaded", start) : start();
})();
