"use strict";
// Values on hover, focus and tap. Without this script the titles inside the figures do it, one at a time.
(function () {
  const tip = document.getElementById("tip");
  let shown = null;

  function hide() {
    tip.hidden = true;
    shown = null;
  }

  function show(mark) {
    shown = mark;
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const x = Math.min(Math.max(at.left + at.width / 2 - own.width / 2, 6), wide - own.width - 6);
    const above = at.top - own.height - 8;
    tip.style.left = x + "px";
    tip.style.top = (above > 4 ? above : Math.min(at.bottom + 8, window.innerHeight - own.height - 4)) + "px";
  }

  for (const svg of document.querySelectorAll("figure svg")) {
    const marks = Array.from(svg.querySelectorAll(".has-data")).filter((m) => {
      const title = m.querySelector("title");
      if (!title) return false;
      m.setAttribute("aria-label", title.textContent);
      m.setAttribute("role", "img");
      title.remove(); // the browser would show it too, later and on top
      return true;
    });
    if (!marks.length) continue;
    svg.setAttribute("role", "group"); // its marks can be reached
    // one stop for the tab key a figure; arrows go on from there
    marks.forEach((m, i) => m.setAttribute("tabindex", i ? "-1" : "0"));
    marks.forEach((m, i) => {
      m.addEventListener("mouseenter", () => show(m));
      m.addEventListener("mouseleave", hide);
      m.addEventListener("focus", () => show(m));
      m.addEventListener("blur", hide);
      m.addEventListener("click", (e) => { e.stopPropagation(); show(m); });
      m.addEventListener("keydown", (e) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
        const to = e.key === "Home" ? 0 : e.key === "End" ? marks.length - 1 : step ? i + step : -1;
        if (to < 0 || to >= marks.length) return;
        e.preventDefault();
        m.setAttribute("tabindex", "-1");
        marks[to].setAttribute("tabindex", "0");
        marks[to].focus({ preventScroll: false });
      });
    });
  }
  document.addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });
  document.addEventListener("click", hide);
  window.addEventListener("scroll", () => { if (shown) show(shown); }, { passive: true, capture: true });

  // paper shows what is folded
  let folded = [];
  window.addEventListener("beforeprint", () => {
    hide();
    folded = Array.from(document.querySelectorAll("details:not([open])"));
    folded.forEach((d) => { d.open = true; });
  });
  window.addEventListener("afterprint", () => {
    folded.forEach((d) => { d.open = false; });
    folded = [];
  });
})();
