// What waits for the reader's first movement, whatever it is: `onFirstMovement(call)`.
// The buttons that copy code do: making them takes longer than all else that a page does when it
// opens. `copyButtons()` brings them at once.
(() => {
  const address = new URL("copy.js", document.currentScript.src);
  const signs = ["scroll", "wheel", "pointermove", "pointerdown", "touchstart", "keydown"];
  const moved = new Promise((done) =>
    signs.forEach((sign) => addEventListener(sign, done, { passive: true, once: true })),
  );
  window.onFirstMovement = (call) => moved.then(call);

  let coming = null;
  window.copyButtons = () =>
    (coming ??= new Promise((done) => {
      const script = document.createElement("script");
      script.src = address;
      script.onload = done;
      document.head.append(script);
    }));
  onFirstMovement(copyButtons);
})();
