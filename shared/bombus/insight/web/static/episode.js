// Replays an episode in time: a call appears when it began, and its reply when it ended.
"use strict";
(() => {
  const form = document.getElementById("replay");
  if (!form) return;
  const [play, slider, shown, speed] = ["play", "second", "shown", "speed"].map((id) => document.getElementById(id));
  let ended = Number(form.dataset.ended);
  let last = 0;

  function show(second) {
    shown.textContent = `${second.toFixed(1)} s`;
    for (const call of document.querySelectorAll("[data-began]")) {
      call.hidden = second < Number(call.dataset.began);
      for (const reply of call.querySelectorAll(".reply")) reply.hidden = second < Number(call.dataset.ended);
    }
  }

  function tick(now) {
    if (play.getAttribute("aria-pressed") !== "true") return;
    const second = Math.min(ended, Number(slider.value) + ((now - last) / 1000) * Number(speed.value));
    last = now;
    slider.value = second;
    show(second);
    if (second >= ended) play.setAttribute("aria-pressed", "false");
    else requestAnimationFrame(tick);
  }

  play.addEventListener("click", () => {
    const starts = play.getAttribute("aria-pressed") !== "true";
    play.setAttribute("aria-pressed", String(starts));
    if (!starts) return;
    if (Number(slider.value) >= ended) slider.value = 0;
    last = performance.now();
    requestAnimationFrame(tick);
  });
  slider.addEventListener("input", () => show(Number(slider.value)));
  document.addEventListener("moved", () => {
    const isWhole = Number(slider.value) >= ended;
    ended = Math.max(0, ...[...document.querySelectorAll("[data-began]")].map((each) => Number(each.dataset.ended)));
    slider.max = ended;
    if (isWhole) slider.value = ended;
    show(Number(slider.value));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
})();
