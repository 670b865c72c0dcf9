// Draws a plan: memory over the step, buffers in their arenas, lanes. All of them share one axis of time, in ticks.
draws((given) => {
  if (!given.views.length) return;
  const find = (id) => document.getElementById(id);
  find("picture").hidden = false;

  const AREA_COLOURS = ["shards", "optimizer", "gradients", "full-gradients", "gathered", "activations", "buffers"];
  const WHAT_COLOURS = ["gathered", "shards", "buffers", "full-gradients", "gradients", "activations", "activations"];
  const KIND_COLOURS = ["compute", "gathered", "full-gradients", "shards", "activations", "optimizer", "python", "gradients"];
  const KIND_NAMES = ["compute", "gathers of weights", "reductions of gradients", "shards from another tier",
    "activations from or to another tier", "the optimizer's states", "Python", "gradients to another tier"];
  const MEMORY_ROOM = 1.12; // of the scale, above what is most
  const FAR = 2.5; // a limit of more times the peak would flatten the picture: it is said in words
  const LEAST_TICKS = 200; // the closest zoom
  const AHEAD = 1200; // pixels beyond the window that are drawn too
  const FADED = 0.18; // how much of its colour is left to what is of another layer

  // Numbers come as distances from the one before.
  const summed = (steps) => {
    const out = new Float64Array(steps.length);
    let value = 0;
    for (let i = 0; i < steps.length; i++) out[i] = value += steps[i];
    return out;
  };
  for (const view of given.views) {
    view.memory.at = summed(view.memory.at);
    view.memory.bytes = view.memory.bytes.map(summed);
    view.memory.sum = view.memory.at.map((_, i) => view.memory.bytes.reduce((n, area) => n + area[i], 0));
    for (const row of [...view.lanes, ...view.pools]) row.at = summed(row.at);
    // The longest item of a row says how far back one may begin that still reaches into what is shown.
    for (const row of [...view.lanes, ...view.pools]) row.longest = row.length.reduce((a, b) => Math.max(a, b), 0);
  }

  let view, from, until, cursor, layer, panels = [], palette = {}, waiting = false;

  // The last position whose value is not above the given one.
  function before(sorted, value) {
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      sorted[middle] <= value ? (low = middle + 1) : (high = middle);
    }
    return low - 1;
  }
  const time = (ticks) => duration(ticks * view.tick);
  const partAt = (ticks) => view.parts[Math.max(0, before(view.parts.map((p) => p.begin), ticks))];

  // What is drawn where ------------------------------------------------------------------------------------------

  function build() {
    const place = find("panels");
    place.replaceChildren();
    panels = [{ canvas: find("axis"), draw: drawAxis }];
    const add = (kind, title, note, draw, row, hit, what) => {
      const canvas = element("canvas", { className: kind, role: "img" });
      canvas.setAttribute("aria-label", title + (note ? ", " + note : ""));
      const heading = element(kind === "lane" ? "h3" : "h2", {}, title);
      if (note) heading.append(" ", element("small", { className: "faint" }, note));
      place.append(heading);
      const panel = { canvas, draw, row, hit, kind, what };
      place.append(element("div", { className: "panel" }, canvas));
      panels.push(panel);
      canvas.addEventListener("pointermove", (e) => hover(e, panel));
      canvas.addEventListener("pointerleave", () => { find("tip").hidden = true; });
      canvas.addEventListener("pointerdown", (e) => press(e, panel));
      canvas.addEventListener("pointerup", (e) => lift(e, panel));
      canvas.addEventListener("pointercancel", (e) => pointers.delete(e.pointerId));
      canvas.addEventListener("wheel", wheel, { passive: false });
      return panel;
    };
    const note = limitText();
    add("memory", "Memory of the device, by what it is", note, drawMemory, view.memory, null);
    place.append(legend());
    for (const pool of view.pools) {
      const panel = add("pool", pool.name, bytes(pool.size), drawPool, pool, hitPool, "buffer");
      if (pool === view.pools[view.pools.length - 1] && pool.length.length > 20) panel.canvas.classList.add("tall");
    }
    place.append(element("h2", {}, "Lanes ", element("small", { className: "faint" }, "transfers queue on them; compute goes on beside")));
    const used = new Set(view.lanes.flatMap((lane) => lane.kind));
    place.append(element("ul", { className: "legend" },
      ...[...used].sort((a, b) => a - b).map((k) => entry(KIND_COLOURS[k], KIND_NAMES[k])),
      element("li", {}, hatchSwatch(), "the part of a transfer that the step waits for")));
    for (const lane of view.lanes) add("lane", lane.name, lane.busy, drawLane, lane, hitLane, "bar");
    const layers = view.layers.map((name, i) => [name || "no layer of its own", i]);
    find("layer").replaceChildren(element("option", { value: -1 }, "all"), ...layers.filter(([, i]) => i || used.size)
      .map(([name, i]) => element("option", { value: i }, name)));
    cursor = peakAt();
    choose(-1);
    show(0, view.total);
  }
  function limitText() {
    const { device, reserve, peak } = given.limit;
    if (device == null) return "how much the device has is not known";
    const aside = reserve ? ", of which " + bytes(reserve) + " reserved" : "";
    return "the device has " + bytes(device) + aside + (device > FAR * peak ? " (above this scale)" : "");
  }
  const entry = (name, text, ...more) =>
    element("li", {}, element("span", { className: "swatch", style: "background:var(--" + name + ")" }), text, ...more);
  function hatchSwatch() {
    return element("span", { className: "swatch",
      style: "background:repeating-linear-gradient(45deg,var(--text) 0 2px,transparent 2px 5px)" });
  }
  let outputs = [];
  function legend() {
    outputs = given.areas.map(() => element("output"));
    const sum = element("output");
    outputs.push(sum);
    return element("ul", { className: "legend" },
      ...given.areas.map((area, i) => entry(AREA_COLOURS[i], area, outputs[i])).reverse(),
      element("li", {}, element("span", {}, "together"), sum));
  }

  // Drawing ------------------------------------------------------------------------------------------------------

  const repaint = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(); });
  };
  function paint() {
    const ratio = window.devicePixelRatio || 1;
    for (const panel of panels) {
      const { canvas } = panel;
      const box = canvas.getBoundingClientRect();
      if (box.bottom < -AHEAD || box.top > innerHeight + AHEAD) { panel.stale = true; continue; }
      const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
      if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      panel.width = canvas.clientWidth;
      panel.height = canvas.clientHeight;
      panel.draw(pen, panel);
      if (panel.row) {
        drawPhases(pen, panel);
        drawCursor(pen, panel);
      }
    }
  }
  const across = (ticks, panel) => ((ticks - from) / (until - from)) * panel.width;
  const ticksAt = (x, panel) => from + (x / panel.width) * (until - from);

  function drawAxis(pen, panel) {
    const span = (until - from) * view.tick;
    const step = niceStep(span / Math.max(2, panel.width / 110));
    pen.fillStyle = palette.faint;
    pen.strokeStyle = palette.line;
    for (let us = Math.ceil((from * view.tick) / step) * step; us <= until * view.tick; us += step) {
      const x = across(us / view.tick, panel);
      pen.beginPath();
      pen.moveTo(x, 18);
      pen.lineTo(x, 26);
      pen.stroke();
      pen.textAlign = x < 30 ? "left" : x > panel.width - 30 ? "right" : "center";
      pen.fillText(duration(us).replace(/\.?0+(?= )/, ""), x, 9);
    }
    pen.textAlign = "left";
  }
  function niceStep(wanted) {
    const power = 10 ** Math.floor(Math.log10(wanted));
    return power * [1, 2, 5, 10].find((n) => n * power >= wanted);
  }
  function drawPhases(pen, panel) {
    for (const part of view.parts) {
      const x = across(part.begin, panel);
      if (part.begin > 0 && x >= 0 && x <= panel.width) line(pen, x, 0, x, panel.height, palette.faint, [2, 3]);
    }
    if (panel.kind !== "memory") return;
    view.parts.forEach((part, k) => {
      const end = k + 1 < view.parts.length ? view.parts[k + 1].begin : view.total;
      const left = Math.max(0, across(part.begin, panel)), right = Math.min(panel.width, across(end, panel));
      if (right - left > pen.measureText(part.name).width + 12) tag(pen, part.name, left + 4, 11);
    });
  }
  function tag(pen, text, x, y) {
    const width = pen.measureText(text).width;
    pen.fillStyle = palette.ground;
    pen.globalAlpha = 0.8;
    pen.fillRect(x - 2, y - 8, width + 4, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = palette.text;
    pen.fillText(text, x, y);
  }
  function line(pen, x0, y0, x1, y1, style, dash = []) {
    pen.save();
    pen.strokeStyle = style;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.restore();
  }
  function drawCursor(pen, panel) {
    const x = across(cursor, panel);
    if (x >= -1 && x <= panel.width + 1) line(pen, x, 0, x, panel.height, palette.text);
  }
  function scale() {
    const { device, budget, peak } = given.limit;
    const limit = Math.max(...[device, budget].filter((n) => n != null && n <= FAR * peak), 0);
    return MEMORY_ROOM * Math.max(limit, view.memory.sum.reduce((a, b) => Math.max(a, b), 1));
  }
  // One column of pixels shows the moment of it that has most bytes; columns of one moment are drawn at once.
  function drawMemory(pen, panel) {
    const { at, bytes: areas, sum } = view.memory, top = scale(), height = panel.height;
    if (!at.length) return;
    let i = Math.max(0, before(at, from)), begin = 0, shown = -1;
    const flush = (x) => {
      if (shown < 0 || x <= begin) return;
      let low = 0;
      for (let k = 0; k < areas.length; k++) {
        const high = low + areas[k][shown];
        const y = height - (high / top) * height;
        pen.fillStyle = palette[AREA_COLOURS[k]];
        pen.fillRect(begin, y, x - begin, height - (low / top) * height - y);
        low = high;
      }
      begin = x;
    };
    for (let x = 0; x < panel.width; x++) {
      const end = ticksAt(x + 1, panel);
      let most = i;
      while (i + 1 < at.length && at[i + 1] < end) if (sum[++i] > sum[most]) most = i;
      if (most !== shown) {
        flush(x);
        shown = most;
        begin = x;
      }
    }
    flush(panel.width);
    const lines = [[given.limit.device, "the device"],
      [given.limit.reserve ? given.limit.device - given.limit.reserve : null, "less the reserve"],
      [given.limit.budget, "budget"]];
    const taken = [];
    for (const [value, name] of lines) {
      if (value == null || value > top) continue;
      const y = height - (value / top) * height;
      line(pen, 0, y, panel.width, y, palette.text, [6, 4]);
      let where = Math.max(9, y - 9);
      while (taken.some((other) => Math.abs(other - where) < 16)) where += 16;
      taken.push(where);
      const text = name + ", " + bytes(value);
      tag(pen, text, panel.width - pen.measureText(text).width - 8, where);
    }
    const step = niceStep(top / 4);
    for (let value = step; value < top; value += step) {
      const y = height - (value / top) * height;
      line(pen, 0, y, 6, y, palette.text);
      if (y > 22) tag(pen, bytes(value), 9, y);
    }
  }
  // Items of a row that reach into what is shown: their positions.
  function* within(row) {
    let i = Math.max(0, before(row.at, from - row.longest));
    for (; i < row.at.length && row.at[i] <= until; i++) if (row.at[i] + row.length[i] >= from) yield i;
  }
  // What concerns several layers at once has a list of them.
  const isOf = (row, i) => [].concat(row.layer[i]).includes(layer);
  const faded = (row, i) => layer >= 0 && !isOf(row, i);

  // What is of another layer than the chosen one is drawn first, and paler.
  function* backToFront(row) {
    if (layer < 0) return yield* within(row);
    for (const i of within(row)) if (!isOf(row, i)) yield i;
    for (const i of within(row)) if (isOf(row, i)) yield i;
  }
  const shade = (name, pale) => (pale ? mixed(palette[name], palette.ground) : palette[name]);
  const mixes = new Map();
  function mixed(one, other) {
    const key = one + other;
    if (!mixes.has(key)) {
      const part = (text, k) => parseInt(text.slice(1 + 2 * k, 3 + 2 * k), 16);
      mixes.set(key, "rgb(" + [0, 1, 2].map((k) => Math.round(FADED * part(one, k) + (1 - FADED) * part(other, k))) + ")");
    }
    return mixes.get(key);
  }

  function drawLane(pen, panel) {
    const { row, width, height } = panel;
    let lastX = -2, lastStyle = "";
    for (const i of backToFront(row)) {
      const left = across(row.at[i], panel), right = across(row.at[i] + row.length[i], panel);
      const x = Math.max(-1, left), w = Math.max(0.75, Math.min(width + 1, right) - x);
      const pale = faded(row, i), style = KIND_COLOURS[row.kind[i]] + pale;
      // Bars that end within the pixel of one that looks the same add nothing to be seen.
      if (right < lastX + 0.75 && left >= lastX - 1 && style === lastStyle) continue;
      lastX = x + w - 0.75;
      lastStyle = style;
      pen.fillStyle = shade(KIND_COLOURS[row.kind[i]], pale);
      pen.fillRect(x, 1, w > 3 ? w - 0.75 : w, height - 2);
      if (row.waited[i] && !pale) {
        const begin = Math.max(x, across(row.at[i] + row.length[i] - row.waited[i], panel));
        pen.fillStyle = hatch(pen);
        pen.fillRect(begin, 1, Math.max(0.75, x + w - begin), height - 2);
      }
      const readable = row.waited[i] < 0.4 * row.length[i]; // stripes are not written on
      if (!pale && readable) label(pen, view.texts[row.text[i]], x, 0, w, height);
    }
  }
  function drawPool(pen, panel) {
    const { row, height, width } = panel;
    const top = row.size || 1;
    for (const i of backToFront(row)) {
      const x = Math.max(-1, across(row.at[i], panel));
      const w = Math.max(0.75, Math.min(width + 1, across(row.at[i] + row.length[i], panel)) - x);
      const h = Math.max(0.75, (row.bytes[i] / top) * height), y = height - (row.offset[i] / top) * height - h;
      if (w * h < 0.6) continue; // not a pixel
      const pale = faded(row, i);
      pen.fillStyle = shade(WHAT_COLOURS[row.what[i]], pale);
      pen.fillRect(x, y, w, h);
      if (w > 4 && h > 4) {
        pen.strokeStyle = palette.ground;
        pen.lineWidth = 0.75;
        pen.strokeRect(x, y, w, h);
      }
      if (!pale) label(pen, view.texts[row.text[i]], x, y, w, h);
    }
    pen.lineWidth = 1;
  }
  function label(pen, text, x, y, w, h) {
    if (w < 36 || h < 13 || !text) return;
    const fits = Math.floor((w - 8) / 7);
    pen.fillStyle = palette["on-colour"];
    pen.fillText(text.length > fits ? text.slice(0, Math.max(1, fits - 1)) + "…" : text, Math.max(0, x) + 4, y + h / 2);
  }
  let stripes = null;
  function hatch(pen) {
    if (stripes) return stripes;
    const tile = element("canvas", { width: 6, height: 6 });
    const small = tile.getContext("2d");
    small.strokeStyle = palette["on-colour"];
    small.lineWidth = 1.6;
    for (const shift of [-6, 0, 6]) line2(small, shift, 6, shift + 6, 0);
    return (stripes = pen.createPattern(tile, "repeat"));
  }
  function line2(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  // What is chosen -----------------------------------------------------------------------------------------------

  function show(begin, end) {
    const least = Math.min(LEAST_TICKS, view.total);
    const span = Math.min(view.total, Math.max(least, end - begin));
    from = Math.min(Math.max(0, begin), view.total - span);
    until = from + span;
    find("chart").dataset.shown = Math.round(from) + " " + Math.round(until);
    repaint();
  }
  function zoom(factor, at = (from + until) / 2) {
    show(at - (at - from) * factor, at + (until - at) * factor);
  }
  function point(ticks, say) {
    cursor = Math.min(view.total, Math.max(0, ticks));
    const i = Math.max(0, before(view.memory.at, cursor));
    given.areas.forEach((_, k) => { outputs[k].textContent = bytes(view.memory.bytes[k][i] || 0); });
    outputs[given.areas.length].textContent = bytes(view.memory.sum[i] || 0);
    if (say) {
      const most = given.areas.map((area, k) => [view.memory.bytes[k][i] || 0, area]).filter(([n]) => n)
        .sort((a, b) => b[0] - a[0]).slice(0, 3);
      find("now").textContent = time(cursor) + ", " + partAt(cursor).name + ": " + bytes(view.memory.sum[i] || 0) +
        " together; " + most.map(([n, area]) => area + " " + bytes(n)).join(", ");
    }
    repaint();
  }
  function peakAt() {
    const { at, sum } = view.memory;
    let most = 0;
    for (let i = 1; i < sum.length; i++) if (sum[i] > sum[most]) most = i;
    return at.length ? at[most] : 0;
  }
  function reveal(ticks) {
    const span = until - from;
    if (ticks < from || ticks > until) show(ticks - span / 2, ticks + span / 2);
  }
  function choose(which) {
    layer = which;
    find("layer").value = which;
    const section = find("selected");
    section.hidden = which < 0;
    if (which >= 0) list(section);
    repaint();
  }
  // Every buffer and every bar of the chosen layer, in the order of time.
  function list(section) {
    const name = view.layers[layer] || "no layer of its own", rows = [];
    for (const pool of view.pools)
      pool.layer.forEach((_, i) => {
        if (isOf(pool, i)) rows.push([pool.at[i], pool.length[i], given.what[pool.what[i]], view.texts[pool.text[i]],
          pool.name.split(":")[0] + ", at byte " + pool.offset[i].toLocaleString("en"), bytes(pool.bytes[i])]);
      });
    for (const lane of view.lanes)
      lane.layer.forEach((_, i) => {
        if (isOf(lane, i)) rows.push([lane.at[i], lane.length[i], KIND_NAMES[lane.kind[i]], view.texts[lane.text[i]],
          lane.name, lane.bytes[i] ? bytes(lane.bytes[i]) : ""]);
      });
    rows.sort((a, b) => a[0] - b[0]);
    find("selected-title").textContent = "Layer " + name + ": its buffers, and what it does on every lane";
    section.querySelector("tbody").replaceChildren(...rows.slice(0, 400).map(([at, length, what, of, where, n]) => {
      const go = element("button", {}, time(at));
      go.addEventListener("click", () => {
        if (until - from > 20 * Math.max(length, LEAST_TICKS)) show(at - 5 * length, at + 6 * length);
        reveal(at);
        point(at, true);
        find("chart").scrollIntoView({ block: "start" });
      });
      return element("tr", {}, element("td", {}, what), element("td", {}, of), element("td", {}, where),
        element("td", { className: "number" }, n), element("td", { className: "number" }, go),
        element("td", { className: "number" }, time(length)));
    }));
  }

  // Mouse, touch, keys -------------------------------------------------------------------------------------------

  function hitLane(panel, x) {
    const { row } = panel, slack = 3;
    const begin = ticksAt(x - slack, panel), end = ticksAt(x + slack, panel), at = ticksAt(x, panel);
    let found = -1, distance = Infinity;
    for (let i = Math.max(0, before(row.at, begin - row.longest)); i < row.at.length && row.at[i] <= end; i++) {
      if (row.at[i] + row.length[i] < begin) continue;
      const away = Math.max(0, row.at[i] - at, at - row.at[i] - row.length[i]);
      if (away < distance) [found, distance] = [i, away];
    }
    return found;
  }
  function hitPool(panel, x, y) {
    const { row } = panel, at = ticksAt(x, panel), byte = ((panel.height - y) / panel.height) * row.size;
    const near = ((until - from) / panel.width) * 2, reach = (row.size / panel.height) * 2;
    let found = -1;
    for (const i of within(row)) {
      if (at < row.at[i] - near || at > row.at[i] + row.length[i] + near) continue;
      if (byte >= row.offset[i] - reach && byte <= row.offset[i] + row.bytes[i] + reach) {
        found = i;
        if (at >= row.at[i] && at <= row.at[i] + row.length[i] && byte >= row.offset[i] && byte <= row.offset[i] + row.bytes[i]) break;
      }
    }
    return found;
  }
  function hitAt(e, panel) {
    if (!panel.hit) return -1;
    const box = panel.canvas.getBoundingClientRect();
    return panel.hit(panel, e.clientX - box.left, e.clientY - box.top);
  }
  function words(panel, i) {
    const { row } = panel, text = view.texts[row.text[i]], when = time(row.at[i]) + ", for " + time(row.length[i]);
    const names = [].concat(row.layer[i]).map((k) => view.layers[k]).filter(Boolean);
    const of = names.length ? "\nlayer " + names.join(", ") : "";
    if (panel.what === "bar") {
      const moved = row.bytes[i] ? "\n" + bytes(row.bytes[i]) + ", " + row.hidden[i] + " % hidden" : "";
      const waited = row.waited[i] ? "\nthe step waits " + time(row.waited[i]) + " for it" : "";
      return text + moved + waited + of + "\nfrom " + when;
    }
    return given.what[row.what[i]] + (text ? " of " + text : "") + "\n" + bytes(row.bytes[i]) + " (" +
      row.bytes[i].toLocaleString("en") + ") at byte " + row.offset[i].toLocaleString("en") + of + "\nfrom " + when;
  }
  function tip(e, text) {
    const box = find("tip");
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - width - 4)) + "px";
    box.style.top = Math.max(4, e.clientY + 18 + height > innerHeight ? e.clientY - height - 12 : e.clientY + 18) + "px";
  }
  const pointers = new Map();
  let moved = 0;
  function hover(e, panel) {
    const held = pointers.get(e.pointerId);
    if (!held) {
      const i = hitAt(e, panel);
      tip(e, i >= 0 ? words(panel, i) : panel.kind === "memory" ? memoryWords(e, panel) : "");
      if (e.pointerType === "mouse") point(ticksAt(e.clientX - panel.canvas.getBoundingClientRect().left, panel));
      return;
    }
    const others = [...pointers.entries()].filter(([id]) => id !== e.pointerId).map(([, p]) => p);
    const perPixel = (until - from) / panel.width, shift = e.clientX - held.x;
    moved += Math.abs(shift);
    if (others.length) {
      const other = others[0].x, was = Math.abs(held.x - other), is = Math.abs(e.clientX - other);
      const middle = ticksAt((e.clientX + other) / 2 - panel.canvas.getBoundingClientRect().left, panel);
      if (was > 5 && is > 5) zoom(was / is, middle);
    } else if (moved > 4) {
      show(from - shift * perPixel, until - shift * perPixel);
    }
    held.x = e.clientX;
  }
  function memoryWords(e, panel) {
    const at = ticksAt(e.clientX - panel.canvas.getBoundingClientRect().left, panel);
    const i = Math.max(0, before(view.memory.at, at));
    return time(at) + ", " + partAt(at).name + "\n" + bytes(view.memory.sum[i] || 0) + " together";
  }
  function press(e, panel) {
    panel.canvas.setPointerCapture(e.pointerId);
    if (!pointers.size) moved = 0;
    pointers.set(e.pointerId, { x: e.clientX });
  }
  function lift(e, panel) {
    pointers.delete(e.pointerId);
    if (moved > 4 || pointers.size) return;
    const i = hitAt(e, panel);
    point(ticksAt(e.clientX - panel.canvas.getBoundingClientRect().left, panel), true);
    if (panel.hit) choose(i < 0 || isOf(panel.row, i) ? -1 : [].concat(panel.row.layer[i])[0]);
    tip(e, i >= 0 ? words(panel, i) : panel.kind === "memory" ? memoryWords(e, panel) : "");
  }
  function wheel(e) {
    if (!e.ctrlKey && !e.metaKey && !e.shiftKey && Math.abs(e.deltaX) <= Math.abs(e.deltaY)) return; // the page's own
    e.preventDefault();
    const box = e.currentTarget.getBoundingClientRect(), at = from + ((e.clientX - box.left) / box.width) * (until - from);
    if (e.ctrlKey || e.metaKey) zoom(1.0025 ** e.deltaY, at);
    else {
      const shift = ((e.deltaX || e.deltaY) / box.width) * (until - from);
      show(from + shift, until + shift);
    }
  }
  function step(direction) {
    const { at } = view.memory;
    let i = before(at, cursor) + direction;
    if (direction < 0 && i + 1 < at.length && at[i + 1] < cursor) i += 1;
    while (i > 0 && i < at.length - 1 && at[i] === cursor) i += direction;
    point(at[Math.min(at.length - 1, Math.max(0, i))], true);
    reveal(cursor);
  }
  const keys = {
    ArrowLeft: (e) => (e.shiftKey ? show(from - (until - from) / 10, until - (until - from) / 10) : step(-1)),
    ArrowRight: (e) => (e.shiftKey ? show(from + (until - from) / 10, until + (until - from) / 10) : step(1)),
    ArrowUp: () => next(-1), ArrowDown: () => next(1),
    "+": () => zoom(0.6, cursor), "=": () => zoom(0.6, cursor), "-": () => zoom(1 / 0.6, cursor),
    0: () => show(0, view.total), Home: () => { point(0, true); reveal(0); },
    End: () => { point(view.total, true); reveal(view.total); },
    p: () => toPeak(), P: () => toPeak(), Escape: () => choose(-1),
  };
  function next(direction) {
    const options = [...find("layer").options].map((o) => Number(o.value));
    const at = options.indexOf(layer) + direction;
    choose(options[(at + options.length) % options.length]);
    find("now").textContent = layer < 0 ? "all layers" : "layer " + find("layer").selectedOptions[0].textContent;
  }
  function toPeak() {
    point(peakAt(), true);
    reveal(cursor);
  }
  find("chart").addEventListener("keydown", (e) => {
    const act = keys[e.key];
    if (!act || e.altKey || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    act(e);
  });
  find("in").addEventListener("click", () => zoom(0.6, cursor >= from && cursor <= until ? cursor : undefined));
  find("out").addEventListener("click", () => zoom(1 / 0.6));
  find("all").addEventListener("click", () => show(0, view.total));
  find("peak").addEventListener("click", toPeak);
  find("layer").addEventListener("change", (e) => choose(Number(e.target.value)));
  find("view").append(...given.views.map((v, i) => element("option", { value: i }, v.title)));
  find("view-choice").hidden = given.views.length < 2;
  find("view").addEventListener("change", (e) => {
    view = given.views[Number(e.target.value)];
    build();
    point(cursor);
  });

  function colours() {
    stripes = null;
    for (const name of ["ground", "text", "faint", "line", "on-colour", ...AREA_COLOURS, ...KIND_COLOURS])
      palette[name] = colour(name);
    repaint();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", colours);
  addEventListener("resize", repaint);
  addEventListener("scroll", () => { if (panels.some((p) => p.stale)) { panels.forEach((p) => { p.stale = false; }); repaint(); } }, { passive: true });
  colours();
  view = given.views[0];
  build();
  point(cursor);
});
