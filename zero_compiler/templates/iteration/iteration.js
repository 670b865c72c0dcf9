// Plays the steps of one iteration: what each rank holds, what is under way, and a sentence for each step.
draws((given) => {
  const find = (id) => document.getElementById(id);
  find("explained").hidden = false;
  const text = (i) => given.texts[i];
  const LEAST_MS = 1500, PER_LETTER_MS = 28; // a step is shown for as long as its sentence takes to read

  // Lists become objects, with the fields of the classes in report/iteration.py.
  for (const model of given.models)
    for (const run of model.runs) {
      run.steps = run.steps.map(([phase, line, words]) => ({ phase: text(phase), line: text(line), words: text(words) }));
      run.holdings = run.holdings.map(([kind, place, layer, name, n, begin, ready, end, rows]) =>
        ({ kind, place: text(place), layer: text(layer), name: text(name), bytes: n, begin, ready, end, rows }));
      run.moves = run.moves.map(([way, what, begin, end]) => ({ way: text(way), what: text(what), begin, end }));
      run.memory = run.steps.map((_, at) => given.kinds.map((_, kind) => run.holdings.filter((h) =>
        h.kind === kind && h.place === "memory" && h.begin <= at && at <= h.end).reduce((n, h) => n + h.bytes, 0)));
      run.most = Math.max(...run.memory.map((row) => row.reduce((a, b) => a + b, 0)));
    }

  let model = given.models[0], run = model.runs[0], at = 0, timer = 0, slots = [];

  // The places that bytes can be in stay where they are on the page, full or empty.
  function build() {
    slots = [];
    // What passes through buffers may be wider than the rest: it does not set the scale.
    const passing = ["staging", "rows that the optimizer has read"];
    const most = Math.max(...model.runs.flatMap((r) => r.holdings.filter((h) => !passing.includes(given.kinds[h.kind][0]))
      .map((h) => h.bytes)));
    const ranks = [...Array(given.ranks).keys()].map((rank) => {
      const sum = element("output");
      const box = element("div", { className: "rank" }, element("h2", {}, "Rank " + rank, sum));
      slots.push({ sum, rank });
      for (const place of ["memory", "file"]) {
        const here = run.holdings.filter((h) => h.place === place);
        if (!here.length) continue;
        const part = element("div", { className: "place " + place });
        if (place === "file") part.append(element("h3", { className: "faint whole" }, "Its files (NVMe)"));
        for (const layer of model.layers.map(text)) {
          const kinds = [...new Set(here.filter((h) => h.layer === layer).map((h) => h.kind))].sort((a, b) => a - b);
          if (!kinds.length) continue;
          const group = element("div", { className: "layer" }, element("h3", {}, layer || "beside the layers"));
          for (const kind of kinds) {
            const what = element("span", { title: given.kinds[kind][2] }), size = element("span"), bar = element("div", { className: "bar" });
            const box = element("div", { className: "slot" }, element("div", { className: "what" }, what, size), bar);
            const of = here.filter((h) => h.layer === layer && h.kind === kind);
            slots.push({ box, what, size, bar, of, kind, rank, most });
            group.append(box);
          }
          part.append(group);
        }
        box.append(part);
      }
      return box;
    });
    find("ranks").replaceChildren(...ranks);
    find("about").textContent = model.about + " " + run.about;
    find("slider").max = run.steps.length - 1;
    const used = new Set(run.holdings.map((h) => h.kind));
    find("legend").replaceChildren(...[...used].sort((a, b) => a - b).map((kind) => {
      const [name, colour, meaning] = given.kinds[kind];
      return element("div", {}, element("dt", {}, element("span", { className: "swatch", style: "background:var(--" + colour + ")" }), name),
        element("dd", {}, meaning));
    }), element("div", {}, element("dt", {}, element("span", { className: "swatch striped" }), "striped"),
      element("dd", {}, "rows of rank 1, wherever they are")));
  }

  function show(step) {
    at = Math.min(run.steps.length - 1, Math.max(0, step));
    const { phase, line, words } = run.steps[at];
    find("words").replaceChildren(...words.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part)));
    find("line").textContent = line.replace(/ +/g, " ");
    find("slider").value = at;
    find("slider").setAttribute("aria-valuetext", "step " + at + " of " + (run.steps.length - 1) + ", " + phase);
    find("count").textContent = at + " of " + (run.steps.length - 1) + ": " + phase;
    for (const id of ["first", "back"]) find(id).disabled = at === 0;
    for (const id of ["last", "next"]) find(id).disabled = at === run.steps.length - 1;
    for (const slot of slots) slot.sum ? total(slot) : fill(slot);
    const names = { ranks: ["rank 0", "rank 1"], read: ["file", "memory"], write: ["memory", "file"], copy: ["host", "device"] };
    find("moves").replaceChildren(...run.moves.filter((m) => m.begin <= at && at <= m.end).map((m) =>
      element("li", {}, element("span", { className: "ends" }, names[m.way][0]), element("span", { className: "way" }),
        element("span", { className: "ends" }, names[m.way][1]), element("span", {}, m.what))));
    history.replaceState(null, "", "#" + [given.models.indexOf(model), model.runs.indexOf(run), at].join("/"));
    draw();
  }
  const total = ({ sum }) => { sum.textContent = bytes(run.memory[at].reduce((a, b) => a + b, 0)) + " in memory"; };

  function fill({ box, what, size, bar, of, kind, rank, most }) {
    const here = of.filter((h) => h.begin <= at && at <= h.end), [name, colour] = given.kinds[kind];
    const state = !here.length ? "gone" : here.every((h) => at < h.ready) ? "coming"
      : at && here.every((h) => h.end === at) && at < run.steps.length - 1 ? "leaving"
      : here.some((h) => h.begin === at || h.ready === at) && at ? "new" : "";
    box.className = "slot " + state;
    // Rows are named where the place is for one parameter.
    const rows = new Set(of.map((h) => h.name)).size === 1 && of[0].rows.length ? of[0].rows[rank] : null;
    const which = rows ? (rows[1] < rows[0] ? ", no row" : ", rows " + rows[0] + "–" + rows[1]) : "";
    const note = { coming: ", arriving", leaving: ", then gone" }[state] || "";
    what.textContent = name + which + note;
    const n = here.reduce((sum, h) => sum + h.bytes, 0);
    size.textContent = here.length ? bytes(n) : "–";
    bar.style.width = Math.min(100, (100 * n) / most) + "%";
    // Of what is rows of parameters, whose rows they are.
    const own = ["own weights", "chunk on its way", "gradient", "optimizer states", "rows that the optimizer has read"];
    const parts = name === "full weight" ? [...Array(given.ranks).keys()] : [own.includes(name) && dividedBetweenRanks() ? rank : 0];
    bar.replaceChildren(...parts.map((of) => element("i", { className: of ? "striped" : "", style: "background-color:var(--" + colour + ")" })));
  }
  const dividedBetweenRanks = () => run.holdings.some((h) => given.kinds[h.kind][0] === "own weights");

  function draw() {
    const canvas = find("memory"), ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    // All runs of a model have one scale: what a stage saves is seen.
    const top = 1.15 * Math.max(...model.runs.map((r) => r.most)), w = width / run.steps.length;
    run.memory.forEach((row, i) => {
      let low = 0;
      row.forEach((n, kind) => {
        pen.fillStyle = colour(given.kinds[kind][1]);
        pen.fillRect(i * w, height - ((low + n) / top) * height, w - (w > 6 ? 1 : 0), (n / top) * height);
        low += n;
      });
    });
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.strokeRect(at * w + 1, 1, Math.max(2, w - 2), height - 2);
    pen.fillStyle = colour("text");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(bytes(run.most) + " at most", 6, 14);
  }

  // Choosing and playing -----------------------------------------------------------------------------------------

  function choices(id, items, chosen, choose, small) {
    const place = find(id);
    place.replaceChildren(place.querySelector("legend"), ...items.map((item, i) => {
      const input = element("input", { type: "radio", name: id, value: i, checked: item === chosen });
      input.addEventListener("change", () => choose(item));
      return element("label", {}, input, item.title || item.name, ...(small ? [element("small", {}, small(item))] : []));
    }));
  }
  function select(newModel, newRun, step) {
    pause();
    const moved = newModel !== model;
    model = newModel;
    run = newRun;
    if (moved || !find("models").querySelector("input")) {
      choices("models", given.models, model, (m) => select(m, m.runs[model.runs.indexOf(run)], 0));
      choices("runs", model.runs, run, (r) => select(model, r, 0), (r) => bytes(r.most));
    }
    for (const [id, list, chosen] of [["models", given.models, model], ["runs", model.runs, run]])
      find(id).querySelectorAll("input").forEach((input, i) => { input.checked = list[i] === chosen; });
    build();
    show(step);
  }
  function pause() {
    clearTimeout(timer);
    timer = 0;
    find("play").textContent = "Play";
    find("play").setAttribute("aria-pressed", "false");
  }
  function play() {
    if (timer) return pause();
    if (at === run.steps.length - 1) show(0);
    find("play").textContent = "Pause";
    find("play").setAttribute("aria-pressed", "true");
    const later = () => {
      timer = setTimeout(() => {
        show(at + 1);
        at < run.steps.length - 1 ? later() : pause();
      }, LEAST_MS + PER_LETTER_MS * run.steps[at].words.length);
    };
    later();
  }
  const go = (step) => { pause(); show(step); };
  for (const [id, step] of [["first", () => 0], ["back", () => at - 1], ["next", () => at + 1], ["last", () => run.steps.length - 1]])
    find(id).addEventListener("click", () => go(step()));
  find("play").addEventListener("click", play);
  find("slider").addEventListener("input", (e) => go(Number(e.target.value)));
  find("memory").addEventListener("click", (e) => {
    const box = e.currentTarget.getBoundingClientRect();
    go(Math.floor(((e.clientX - box.left) / box.width) * run.steps.length));
  });
  addEventListener("keydown", (e) => {
    if (e.altKey || e.ctrlKey || e.metaKey || e.target.closest("input, summary")) return;
    const act = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0),
      End: () => go(run.steps.length - 1), " ": e.target.closest("button") ? null : play }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  });
  function fromAddress() {
    const [m, r, step] = location.hash.slice(1).split("/").map(Number);
    const chosen = given.models[m] || given.models[0];
    select(chosen, chosen.runs[r] || chosen.runs[0], step || 0);
  }
  addEventListener("hashchange", fromAddress);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  fromAddress();
});
