// What a page holds far from its screen has no layout while it loads (class `afar`: see slim.py).
// Afterwards it gets one, piece by piece in spare moments: whoever prints or copies has all of it.
window.allLaidOut = new Promise((done) => {
  const spare = window.requestIdleCallback ?? setTimeout;
  addEventListener("load", () => {
    const left = [...document.querySelectorAll(".afar")];
    const next = () => {
      left.shift()?.classList.remove("afar");
      if (left.length) return spare(next);
      dispatchEvent(new Event("resize")); // who asks which boxes scroll asks again
      done();
    };
    spare(next);
  });
});
