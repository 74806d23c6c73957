// Keeps a page up to date: its regions marked `data-live`, its charts, and the position of the log that it shows.
// Other scripts may listen to the document's event "moved", which comes after the regions were replaced.
"use strict";
(() => {
  const slider = document.getElementById("position");
  const live = document.getElementById("live");
  const PAUSE_MS = 80; // while the slider moves
  const at = () => new URLSearchParams(location.search).get("at");
  const page = document.getElementById("main");
  const made = new WeakMap(); // by region: the HTML that it was made from, without what scripts have drawn
  for (const region of document.querySelectorAll("[data-live]")) made.set(region, region.innerHTML);
  let loading = null;

  function here(path, parameters) {
    const url = new URL(path, location.href);
    for (const [name, value] of Object.entries(parameters)) {
      if (value === null) url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    return url;
  }

  // Replaces what has changed in the marked regions of the page. Focus and open details stay.
  async function refresh() {
    if (loading) loading.abort();
    const own = loading = new AbortController();
    let text;
    try {
      text = await (await fetch(location.href, { signal: own.signal })).text();
    } catch {
      return;
    }
    const fresh = new DOMParser().parseFromString(text, "text/html");
    if (slider && !fresh.getElementById("position")) return; // the log is being read again
    // At positions without this page's run, step or episode, the answer says so in its place.
    const main = document.getElementById("main");
    if (fresh.getElementById("missing")) main.replaceWith(fresh.getElementById("main"));
    else if (page.querySelector("#missing")) return location.reload();
    else if (main !== page) main.replaceWith(page);
    for (const region of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(region.id);
      if (!next || next.innerHTML === made.get(region)) continue;
      const html = next.innerHTML;
      const open = [...region.querySelectorAll("details")].map((each) => each.open);
      const focused = [...region.querySelectorAll("a, summary, [tabindex]")].indexOf(document.activeElement);
      const chosen = [...region.querySelectorAll("input:checked")].map((each) => each.id);
      region.replaceChildren(...next.childNodes);
      made.set(region, html);
      for (const id of chosen) document.getElementById(id).checked = true;
      region.querySelectorAll("details").forEach((each, index) => { each.open = open[index] || false; });
      if (focused >= 0) region.querySelectorAll("a, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
    }
    // The links of the page's frame name the position too.
    for (const each of document.querySelectorAll("body > header a")) each.href = here(each.href, { at: at() });
    const now = fresh.getElementById("position");
    if (now && slider) {
      slider.max = now.max;
      if (at() === null && document.activeElement !== slider) slider.value = now.value;
    }
    drawAll();
    document.dispatchEvent(new CustomEvent("moved", { detail: { at: at() } }));
  }

  // ---- charts ----

  const views = new Map(); // by the chart's key: its view, its specification, and its points

  async function embed(element, spec) {
    const options = { ast: true, actions: false, renderer: "svg", logLevel: 1, tooltip: { theme: "custom" } };
    if (innerWidth < 500) spec.config.legend.columns = 1;
    return (await vegaEmbed(element, { ...spec, autosize: { type: "fit-x", contains: "padding" } }, options)).view;
  }

  const box = document.getElementById("charts");
  let newest = 0; // the position up to which the charts show everything
  let shownAt = null;

  async function drawCharts() {
    if (!box || !box.isConnected || !window.vegaEmbed) return;
    const isMore = at() === null && shownAt === null && newest > 0;
    const answer = await fetch(here(box.dataset.points, { at: at(), after: isMore ? newest : null }));
    if (!answer.ok) return;
    const found = await answer.json();
    shownAt = at();
    if (isMore && found.position < newest) return;
    newest = found.position;
    for (const figure of box.querySelectorAll("[data-chart]")) {
      const key = figure.dataset.chart;
      const chart = views.get(key) || { spec: found.specs[key], points: [] };
      views.set(key, chart);
      const isAdded = isMore && !found.whole.includes(key);
      if (isAdded && !found.points[key].length) continue;
      chart.points = isAdded ? chart.points.concat(found.points[key]) : found.points[key];
      await drawChart(figure, chart);
    }
  }

  async function drawChart(figure, chart) {
    const drawing = figure.querySelector(".drawing");
    if (chart.view) {
      await chart.view.data("points", chart.points).runAsync();
    } else if (chart.points.length) {
      chart.view = await embed(drawing, { ...chart.spec, data: { name: "points", values: chart.points } });
    }
    drawing.classList.toggle("empty", !chart.points.length);
    const details = figure.querySelector("details");
    details.ontoggle = () => fillTable(details, chart.points);
    details.ontoggle();
  }

  function fillTable(details, points) {
    if (!details.open) return;
    const named = (each) => (each.run ? `${each.run} ${each.figure}` : each.figure);
    const names = [...new Set(points.map(named))];
    const rows = new Map(points.map((each) => [each.x, {}]));
    for (const each of points) rows.get(each.x)[named(each)] = each.y;
    const table = document.createElement("table");
    const add = (row, kind, scope, value) => {
      const made = row.appendChild(document.createElement(kind));
      if (scope) made.scope = scope;
      made.textContent = typeof value === "number" ? Number(value.toPrecision(5)) : value ?? "";
    };
    const head = table.createTHead().insertRow();
    for (const name of ["x", ...names]) add(head, "th", "col", name);
    const body = table.createTBody();
    for (const [x, found] of rows) {
      const row = body.insertRow();
      add(row, "th", "row", x);
      for (const name of names) add(row, "td", "", found[name]);
    }
    details.querySelector("div").replaceChildren(table);
  }

  // Draws figures whose whole specification is in the page.
  async function drawRest() {
    if (!window.vegaEmbed) return;
    for (const figure of document.querySelectorAll("[data-drawn]")) {
      if (!figure.querySelector("svg")) await embed(figure.querySelector(".drawing"), JSON.parse(figure.dataset.drawn));
    }
  }

  // One drawing at a time: each begins where the last one ended.
  let drawn = Promise.resolve();
  let isDue = false;
  function drawAll() {
    if (isDue) return;
    isDue = true;
    drawn = drawn.then(() => {
      isDue = false;
      return drawCharts().then(drawRest);
    }).catch(() => {}); // the server cannot be reached
  }

  // ---- time ----

  let moving = 0;
  function move(position) {
    history.replaceState(null, "", here(location.href, { at: position }));
    live.setAttribute("aria-pressed", position === null ? "true" : "false");
    clearTimeout(moving);
    moving = setTimeout(refresh, PAUSE_MS);
  }

  if (slider) {
    slider.addEventListener("input", () => move(slider.value));
    live.addEventListener("click", () => {
      slider.value = slider.max;
      move(null);
    });
  }
  for (const each of document.querySelectorAll("[data-submit]")) each.addEventListener("change", () => each.form.requestSubmit());
  for (const each of document.querySelectorAll("form.choices")) {
    each.addEventListener("formdata", ({ formData }) => {
      if (at() === null) formData.delete("at");
      else formData.set("at", at());
    });
  }

  const isReady = document.body.dataset.ready === "yes";
  let isCurrent = true; // whether the log was read, and we heard of it, all the time since the page was last made
  function hear(message) {
    const state = JSON.parse(message.data);
    if (!isReady) {
      if (state.ready) location.reload();
      else refresh();
      return;
    }
    if (!state.ready) {
      if (isCurrent) refresh(); // the page says why
      isCurrent = false;
    } else if (!isCurrent || (at() === null && state.position > Number(slider.max))) {
      if (!isCurrent) newest = 0; // it may be another log now: the charts begin anew
      isCurrent = true;
      refresh();
    } else {
      slider.max = Math.max(slider.max, state.position);
    }
  }

  // A browser opens six connections to a server at most, for all tabs together: hidden ones have to do without.
  let stream = null;
  function follow() {
    if (stream) isCurrent = false;
    stream?.close();
    stream = null;
    if (document.visibilityState === "hidden") return;
    stream = new EventSource("/events");
    stream.onmessage = hear;
    stream.onerror = () => { isCurrent = false; };
  }
  document.addEventListener("visibilitychange", follow);
  follow();

  addEventListener("load", drawAll);
})();
