// The buttons that copy code come with the reader's first movement: making them takes longer than
// all else that a page does when it opens. `copyButtons()` brings them at once.
(() => {
  const address = new URL("copy.js", document.currentScript.src);
  const signs = ["scroll", "wheel", "pointermove", "pointerdown", "touchstart", "keydown"];
  let coming = null;
  window.copyButtons = () =>
    (coming ??= new Promise((done) => {
      signs.forEach((sign) => removeEventListener(sign, copyButtons));
      const script = document.createElement("script");
      script.src = address;
      script.onload = done;
      document.head.append(script);
    }));
  signs.forEach((sign) => addEventListener(sign, copyButtons, { passive: true }));
})();
