"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById(name);
  const number = new Intl.NumberFormat("en");

  function make(tag, options = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "text") element.textContent = value;
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  // Isolates the direction of a name, so that a right-to-left name does not reorder the numbers next to it
  const named = (name) => make("bdi", { text: name });
  const isolated = (name) => `\u2068${name}\u2069`; // the same for attributes

  function drawn(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  const share = (value) => (Number.isFinite(value) ? value.toFixed(4) : "n/a");
  const rate = (value) => (!Number.isFinite(value) ? "n/a" : value > 0 && value < 1e-3 ? value.toExponential(2) : value < 0.1 ? value.toPrecision(3) : value.toFixed(4));
  const score = (value) => (Math.abs(value) < 10 ? value.toFixed(4) : value.toPrecision(5));

  // ------------------------------------------------------------------------------------------------- threshold

  if (data.counts) showThresholds(data.counts);

  function showThresholds(counts) {
    const last = counts.t.length - 1;
    const at = counts.t.map((threshold, index) => {
      const tp = counts.tp[index], fp = counts.fp[index];
      return {
        threshold, tp, fp,
        precision: tp + fp ? tp / (tp + fp) : NaN,
        recall: tp / counts.relevant,
        f1: (2 * tp) / (tp + fp + counts.relevant),
        fmr: counts.irrelevant ? fp / counts.irrelevant : NaN,
        fnmr: 1 - tp / counts.relevant,
      };
    });
    const slider = byId("slider"), markers = [];
    let chosen = 0, speaking;

    function choose(index) {
      chosen = Math.max(0, Math.min(last, index));
      const here = at[chosen];
      slider.value = chosen;
      byId("at-threshold").textContent = score(here.threshold);
      byId("at-precision").textContent = share(here.precision);
      byId("at-recall").textContent = share(here.recall);
      byId("at-f1").textContent = share(here.f1);
      byId("at-fmr").textContent = rate(here.fmr);
      byId("at-fnmr").textContent = share(here.fnmr);
      const estimated = counts.sampledBelow !== null && here.threshold < counts.sampledBelow;
      byId("at-words").textContent = `Accepted: ${number.format(here.tp)} of ${number.format(counts.relevant)} relevant pairs and ` +
        `${number.format(here.fp)} of ${number.format(counts.irrelevant)} irrelevant pairs${estimated ? " (estimated from a sample)" : ""}.`;
      slider.setAttribute("aria-valuetext", score(here.threshold));
      for (const button of byId("points").children) button.setAttribute("aria-pressed", Number(button.dataset.index) === chosen);
      for (const move of markers) move(here);
      clearTimeout(speaking);
      speaking = setTimeout(() => {
        byId("spoken").textContent = `Threshold ${score(here.threshold)}: precision ${share(here.precision)}, recall ${share(here.recall)}, ` +
          `F1 ${share(here.f1)}, false match rate ${rate(here.fmr)}, false non-match rate ${share(here.fnmr)}.`;
      }, 400);
    }

    slider.max = last;
    slider.addEventListener("input", () => choose(Number(slider.value)));
    const crossing = at.reduce((best, here, index) => (Math.abs(here.fmr - here.fnmr) < Math.abs(at[best].fmr - at[best].fnmr) ? index : best), 0);
    const points = [...counts.points];
    if (counts.irrelevant) points.push({ name: "equal error rates", index: crossing });
    for (const point of points) {
      const button = make("button", { type: "button", text: point.name, "data-index": point.index });
      button.addEventListener("click", () => choose(point.index));
      byId("points").append(button);
    }

    // --------------------------------------------------------------------------------------------------- figures

    // Acklam's rational approximation of the normal quantile; its error is below 1e-8
    function deviate(p) {
      const a = [-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.357751867269, -30.66479806614716, 2.506628277459239];
      const b = [-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572];
      const c = [-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783];
      const d = [0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416];
      if (p > 0.5) return -deviate(1 - p);
      if (p < 0.02425) {
        const q = Math.sqrt(-2 * Math.log(p));
        return (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) / ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
      }
      const q = p - 0.5, r = q * q;
      return ((((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q) / (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
    }

    function steps(low, high, most) {
      const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
      const ticks = [];
      for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) ticks.push(Number(value.toPrecision(10)));
      return ticks;
    }

    // Draws axes and returns functions that map values to positions; `alternative` describes the figure
    function axes(host, x, y, alternative) {
      const width = Math.max(260, host.clientWidth), height = 250, left = y.ticks.length ? 58 : 14, right = 12, top = 8, bottom = 40;
      const place = (value, range, from, to) => from + ((value - range[0]) / (range[1] - range[0] || 1)) * (to - from);
      const px = (value) => place(value, x.range, left, width - right), py = (value) => place(value, y.range, height - bottom, top);
      const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": alternative });
      for (const [value, text] of x.ticks) {
        svg.append(drawn("line", { class: "grid", x1: px(value), x2: px(value), y1: top, y2: height - bottom }));
        svg.append(drawn("text", { x: px(value), y: height - bottom + 16, "text-anchor": "middle" }, text));
      }
      for (const [value, text] of y.ticks) {
        svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }));
        svg.append(drawn("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, text));
      }
      svg.append(drawn("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
      svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x.name));
      svg.append(drawn("text", { x: -(height - bottom + top) / 2, y: 11, transform: "rotate(-90)", "text-anchor": "middle" }, y.name));
      host.replaceChildren(svg);
      return { svg, px, py, left, right: width - right, top, bottom: height - bottom, width };
    }

    const path = (places) => places.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const plain = (value) => [value, String(value)];

    function drawScores() {
      const host = byId("scores"), edges = counts.edges;
      const density = (values) => {
        const total = values.reduce((sum, value) => sum + value, 0) || 1;
        return values.map((value, index) => value / total / (edges[index + 1] - edges[index]));
      };
      const kinds = [["irrelevant", density(counts.ofIrrelevant)], ["relevant", density(counts.ofRelevant)]];
      const highest = Math.max(...kinds.flatMap(([, values]) => values)), range = [edges[0], edges[edges.length - 1]];
      const frame = axes(host, { range, ticks: steps(...range, 5).map(plain), name: "pair score" }, { range: [0, 1.05 * highest], ticks: [], name: "" },
        "Score distributions of relevant and irrelevant pairs; the threshold is a line");
      for (const [kind, values] of kinds) {
        const places = [[frame.px(edges[0]), frame.bottom]];
        values.forEach((value, index) => places.push([frame.px(edges[index]), frame.py(value)], [frame.px(edges[index + 1]), frame.py(value)]));
        places.push([frame.px(range[1]), frame.bottom]);
        frame.svg.append(drawn("path", { class: kind, d: path(places) }));
      }
      const line = drawn("line", { class: "marker", y1: frame.top, y2: frame.bottom });
      const knob = drawn("circle", { class: "dot", r: 7, cy: frame.top + 7 });
      frame.svg.append(line, knob);
      markers.push((here) => {
        const x = Math.max(frame.left, Math.min(frame.right, frame.px(here.threshold)));
        line.setAttribute("x1", x); line.setAttribute("x2", x); knob.setAttribute("cx", x);
      });
      const drag = (event) => {
        const box = frame.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * frame.width;
        const value = range[0] + ((x - frame.left) / (frame.right - frame.left)) * (range[1] - range[0]);
        let low = 0, high = last;
        while (high - low > 1) { const middle = (low + high) >> 1; if (counts.t[middle] < value) low = middle; else high = middle; }
        choose(value - counts.t[low] < counts.t[high] - value ? low : high);
      };
      frame.svg.addEventListener("pointerdown", (event) => { event.preventDefault(); frame.svg.setPointerCapture(event.pointerId); drag(event); });
      frame.svg.addEventListener("pointermove", (event) => { if (frame.svg.hasPointerCapture(event.pointerId)) drag(event); });
    }

    function drawCurve(host, x, y, of, alternative) {
      const frame = axes(host, x, y, alternative);
      const places = at.map(of).filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b)).map(([a, b]) => [frame.px(a), frame.py(b)]);
      frame.svg.append(drawn("path", { class: "curve", d: path(places) }));
      for (const point of counts.points) {
        const [a, b] = of(at[point.index]);
        if (!Number.isFinite(a) || !Number.isFinite(b)) continue;
        const mark = drawn("circle", { class: "point", r: 4, cx: frame.px(a), cy: frame.py(b) });
        mark.append(drawn("title", {}, point.name));
        frame.svg.append(mark);
      }
      const dot = drawn("circle", { class: "dot", r: 6 });
      frame.svg.append(dot);
      markers.push((here) => {
        const [a, b] = of(here), known = Number.isFinite(a) && Number.isFinite(b);
        dot.setAttribute("visibility", known ? "visible" : "hidden");
        if (known) { dot.setAttribute("cx", frame.px(a)); dot.setAttribute("cy", frame.py(b)); }
      });
    }

    function drawErrors() {
      const host = byId("errors");
      const of = (here) => [here.fmr, here.fnmr].map((value) => (value > 0 && value < 1 ? deviate(value) : NaN));
      const known = at.map(of).filter((pair) => pair.every(Number.isFinite));
      if (!known.length) { host.replaceChildren(make("p", { class: "small", text: "At every threshold one of the error rates is 0 or 1." })); return; }
      const rates = [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999];
      const rateName = (value) => (value >= 1e-3 ? String(value) : `1e${Math.round(Math.log10(value))}`);
      const axis = (side, name, most) => {
        const values = known.map((pair) => pair[side]), low = Math.min(...values), high = Math.max(...values), spare = 0.05 * (high - low) || 0.5;
        let ticks = rates.map((value) => [deviate(value), rateName(value)]).filter(([value]) => value >= low - spare && value <= high + spare);
        while (ticks.length > most) ticks = ticks.filter((_, index) => index % 2 === 0);
        return { range: [low - spare, high + spare], ticks, name };
      };
      drawCurve(host, axis(0, "false match rate", 6), axis(1, "false non-match rate", 7), of,
        "Detection error trade-off: false non-match rate against false match rate, on normal deviate axes");
    }

    function draw() {
      markers.length = 0;
      drawScores();
      const unit = steps(0, 1, 5).map(plain);
      drawCurve(byId("precision-recall"), { range: [0, 1], ticks: unit, name: "recall" }, { range: [0, 1.02], ticks: unit, name: "precision" },
        (here) => [here.recall, here.precision], "Precision-recall curve over all pairs, with the operating points");
      drawErrors();
      for (const move of markers) move(at[chosen]);
    }
    draw();
    choose(counts.points.length ? counts.points[0].index : last >> 1);
    let width = window.innerWidth, waiting;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(draw, 100);
    });
  }

  // --------------------------------------------------------------------------------------------------- classes

  const columns = [["class", false], ["queries", true], ["mAP", true], ["recall@1", true], ["confused with", false]];
  if (data.models.length > 1) columns.push([`mAP of ${isolated(data.models[1])}`, true]);
  const table = byId("class-table"), filter = byId("filter"), moreClasses = byId("more-classes");
  let sorted = { column: 2, up: true }, shownClasses = 50;
  columns.forEach(([name, right], column) => {
    const button = make("button", { type: "button", text: name });
    button.addEventListener("click", () => {
      sorted = { column, up: sorted.column === column ? !sorted.up : column !== 1 && column !== 4 };
      listClasses();
    });
    table.tHead.rows[0].append(make("th", { scope: "col", class: right ? "number" : null }, button));
  });

  function listClasses() {
    const wanted = filter.value.trim().toLowerCase(), { column, up } = sorted;
    const value = (row) => row[column < 4 ? column : column + 1]; // confusions are sorted by their fraction
    const compare = (a, b) => {
      const one = value(a), other = value(b);
      if (one === null || other === null) return (one === null) - (other === null);
      const order = typeof one === "string" ? one.localeCompare(other, undefined, { numeric: true }) : one - other;
      return (up ? order : -order) || a[0].localeCompare(b[0], undefined, { numeric: true });
    };
    const rows = data.classes.filter((row) => row[0].toLowerCase().includes(wanted)).sort(compare);
    [...table.tHead.rows[0].cells].forEach((cell, index) => {
      if (index === column) cell.setAttribute("aria-sort", up ? "ascending" : "descending"); else cell.removeAttribute("aria-sort");
    });
    const cell = (value) => make("td", { class: "number", text: value === null ? "" : value.toFixed(3) });
    table.tBodies[0].replaceChildren(...rows.slice(0, shownClasses).map(([label, queries, precision, recall, confused, confusedShare, otherPrecision]) => {
      const line = make("tr", {}, make("th", { scope: "row" }, named(label)), make("td", { class: "number", text: number.format(queries) }), cell(precision), cell(recall),
        make("td", { class: "confused" }, ...(confusedShare ? [named(confused), ` (${(100 * confusedShare).toFixed(confusedShare < 0.1 ? 1 : 0)} %)`] : [])));
      if (data.models.length > 1) line.append(cell(otherPrecision));
      return line;
    }));
    byId("class-count").textContent = `${number.format(Math.min(rows.length, shownClasses))} of ${number.format(rows.length)} classes${wanted ? " found" : ""}`;
    moreClasses.hidden = rows.length <= shownClasses;
  }
  filter.addEventListener("input", () => { shownClasses = 50; listClasses(); });
  moreClasses.addEventListener("click", () => { shownClasses += 200; listClasses(); });
  listClasses();

  // ---------------------------------------------------------------------------------------------------- panels

  function shot(name) {
    const [label, where] = data.items[name];
    const frame = make("div", { class: "shot" });
    if (data.images[name]) {
      const image = make("img", { src: data.images[name], alt: `${where}, labelled ${isolated(label)}` });
      image.addEventListener("load", () => { if (Math.max(image.naturalWidth, image.naturalHeight) <= 48) image.className = "tiny"; });
      frame.append(image);
    } else if (data.texts[name]) {
      frame.classList.add("words");
      frame.append(named(data.texts[name]));
    } else {
      frame.textContent = "no image";
    }
    return frame;
  }

  function item(name, kind, ...below) {
    const [label, where, file] = data.items[name];
    const entry = make("li", { class: kind, title: file ? `${where}: ${isolated(file)}` : where });
    entry.append(shot(name), make("span", { class: "name" }, named(label)), ...below);
    return entry;
  }

  function strip(query, found) {
    const list = make("ol", { class: "strip" });
    list.append(item(query, "query", make("span", { class: "score", text: "query" })));
    found.forEach(([name, value, relevant], index) => {
      const badge = make("span", { class: `badge ${relevant ? "relevant" : "irrelevant"}`, text: `${index + 1} ${relevant ? "✓" : "✕"} ` });
      badge.append(make("span", { class: "hidden", text: relevant ? "relevant" : "not relevant" }));
      const parts = [badge];
      if (value !== null) parts.push(make("span", { class: "score", text: Math.abs(value) < 10 ? value.toFixed(3) : value.toPrecision(4) }));
      list.append(item(name, relevant ? "relevant" : "irrelevant", ...parts));
    });
    return list;
  }

  function panel(one) {
    const [label, where, file] = data.items[one.query];
    const head = make("h4", {}, make("b", {}, named(label)), make("span", { text: `AP ${one.ap === null ? "n/a" : one.ap.toFixed(3)}` }), make("span", {}, named(file || where)));
    if (one.note) head.append(make("span", {}, named(one.note)));
    return make("article", { class: "panel" }, head, strip(one.query, one.found));
  }

  function lister(host, button, all, build, step) {
    let shown = 0;
    const more = () => {
      host.append(...all.slice(shown, shown + step).map(build));
      shown = Math.min(all.length, shown + step);
      if (button) button.hidden = shown >= all.length;
    };
    host.replaceChildren();
    more();
    if (button) button.onclick = more;
  }

  const search = byId("search");
  function listPanels() {
    const word = search.value.trim().toLowerCase();
    const matches = ({ query }) => {
      const [label, where, file] = data.items[query];
      return label.toLowerCase().includes(word) || query.split("-")[1] === word || file.toLowerCase().includes(word);
    };
    const found = word ? data.panels.filter(matches) : data.panels.slice(0, data.worst);
    byId("search-count").textContent = word ? `${number.format(found.length)} of ${number.format(data.panels.length)} queries found` : `the ${data.worst} worst queries`;
    lister(byId("panels"), byId("more-panels"), found, panel, 12);
  }
  search.addEventListener("input", listPanels);
  listPanels();

  if (data.changed.length) {
    ["gained", "lost"].forEach((name, side) => {
      const pairs = data.changed[side].map((both) => make("div", { class: "panel both" }, ...both.map(panel)));
      byId(name).append(...(pairs.length ? pairs : [make("p", { text: "No queries." })]));
    });
  }

  function suspect(one) {
    const [label, where, file] = data.items[one.item], [forIt, forOwn, votes] = one.agree;
    const head = make("h4", {}, make("b", {}, named(label), ", perhaps ", named(one.suggested)), make("span", { text: `probability ${one.probability.toFixed(3)}` }),
      make("span", {}, `${forIt} of ${votes} neighbours are `, named(one.suggested), `, ${forOwn} are `, named(label)), make("span", {}, named(file || where)));
    const list = strip(one.item, one.found);
    list.firstChild.querySelector(".score").textContent = "suspect";
    list.querySelectorAll(".badge .hidden").forEach((words, index) => { words.textContent = one.found[index][2] ? "has the suggested label" : "has another label"; });
    return make("article", { class: "panel" }, head, list);
  }
  if (byId("suspect-list")) lister(byId("suspect-list"), byId("more-suspects"), data.suspects, suspect, 12);

  data.duplicates.forEach((group) => {
    const host = make("div", { class: "pairs" }), button = make("button", { type: "button", text: "Show more pairs" });
    const section = make("section", {}, make("h3", { text: `${group.kind[0].toUpperCase()}${group.kind.slice(1)}: ${number.format(group.total)} ${group.total === 1 ? "pair" : "pairs"}` }), host, button);
    byId("duplicate-list").append(section);
    lister(host, button, group.pairs, ([one, other, value]) => {
      const same = data.items[one][0] === data.items[other][0];
      const head = make("h4", {}, make("span", { text: `similarity ${Math.abs(value) < 10 ? value.toFixed(5) : value}` }), make("span", { class: same ? "badge" : "badge irrelevant", text: same ? "" : "labels differ" }));
      const list = make("ul", { class: "strip" }, ...[one, other].map((name) => item(name, "", make("span", { class: "file" }, named(data.items[name][2] || data.items[name][1])))));
      return make("article", { class: "pair" }, head, list);
    }, 12);
  });
})();
