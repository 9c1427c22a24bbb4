"use strict";
// Reads along the charts and filters the tables. Without it the page says everything but less conveniently.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  const size = (bytes) => {
    let count = bytes;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (count < 1024) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
      count /= 1024;
    }
    return `${count.toFixed(1)} TiB`;
  };

  // A cursor over a plot, by pointer or arrow keys. `lefts` are the columns' left edges in parts of the width; `say` gives the text.
  const cursor = (id, lefts, say) => {
    const figure = document.getElementById(id);
    if (!figure || !lefts.length) return;
    const plot = figure.querySelector(".plot");
    const line = figure.querySelector(".cursor");
    const readout = figure.querySelector(".readout");
    readout.textContent = "Point at the chart, or use the arrow keys on it, to read a column.";
    let at = -1;
    const show = (index) => {
      at = Math.max(0, Math.min(lefts.length - 1, index));
      const right = at + 1 < lefts.length ? lefts[at + 1] : 1;
      line.style.left = `${50 * (lefts[at] + right)}%`;
      line.hidden = false;
      readout.textContent = say(at);
      readout.classList.remove("quiet");
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", readout.textContent);
    };
    const pointed = (event) => {
      const box = plot.getBoundingClientRect();
      const part = (event.clientX - box.left) / box.width;
      let low = 0, high = lefts.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (lefts[middle] <= part) low = middle; else high = middle - 1;
      }
      show(low);
    };
    plot.setAttribute("role", "slider");
    plot.setAttribute("tabindex", "0");
    plot.setAttribute("aria-valuemin", 0);
    plot.setAttribute("aria-valuemax", lefts.length - 1);
    plot.setAttribute("aria-valuenow", 0);
    plot.addEventListener("pointermove", pointed);
    plot.addEventListener("pointerdown", pointed);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -lefts.length, End: lefts.length }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      show(at + step);
    });
  };

  if (data.course) {
    const { kinds, phases, modules, rows } = data.course;
    cursor("course", rows.map((row) => row[0]), (index) => {
      const [, phase, module, ...held] = rows[index];
      const total = held.reduce((sum, bytes) => sum + bytes, 0);
      const parts = kinds.map((kind, i) => [kind, held[i]]).filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
      const named = parts.slice(0, 5).map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(", ");
      return `${phases[phase] || "between phases"}, ${modules[module] || "(root)"}: ${size(total)}. ${named}`;
    });
    const { axes, names, which, sent } = data.layers;
    cursor("layers", names.map((_, i) => i / names.length), (index) => {
      const parts = axes.map((axis, i) => [axis, ...sent[which[index]][i]]).filter(([, , , count]) => count > 0);
      const named = parts.map(([axis, up, down, count]) => `${axis} ${size(up)} forward, ${size(down)} backward in ${count}`);
      return `${names[index] || "(root)"}: ${named.join("; ")}`;
    });
  }

  // What a folded path stands for: `layers.{0..2}.w{q,k}`. Stops at `most`.
  const expand = (glob, most = 20000) => {
    const open = glob.indexOf("{");
    if (open < 0) return [glob.replace(/\[(.)\]/g, "$1")];
    let depth = 0, close = open, starts = [open + 1];
    const parts = [];
    for (; close < glob.length; close++) {
      const char = glob[close];
      if (char === "[" && glob[close + 2] === "]") close += 2;
      else if (char === "{") depth++;
      else if (char === "}" && --depth === 0) break;
      else if (char === "," && depth === 1) { parts.push(glob.slice(starts.at(-1), close)); starts.push(close + 1); }
    }
    parts.push(glob.slice(starts.at(-1), close));
    const range = parts.length === 1 && parts[0].match(/^(\d+)\.\.(\d+)(?:\.\.(\d+))?$/);
    let middles = parts;
    if (range) {
      middles = [];
      for (let n = +range[1]; n <= +range[2] && middles.length < most; n += +(range[3] || 1)) middles.push(String(n));
    } else {
      middles = parts.flatMap((part) => expand(part, most));
    }
    const tails = expand(glob.slice(close + 1), most);
    const found = [];
    for (const middle of middles)
      for (const tail of tails) {
        if (found.length >= most) return found;
        found.push(glob.slice(0, open).replace(/\[(.)\]/g, "$1") + middle + tail);
      }
    return found;
  };

  const search = document.querySelector(".search");
  const input = document.getElementById("filter");
  const output = document.getElementById("matches");
  if (!search) return;
  const rows = [...document.querySelectorAll("table.searched tbody tr")].map((row) => ({
    row,
    text: row.textContent.toLowerCase(),
    names: [...row.querySelectorAll("th .path")].flatMap((path) => expand(path.textContent)).map((name) => name.toLowerCase()),
  }));
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { row, text, names } of rows) {
      const hidden = words.filter((word) => !text.includes(word));
      const name = hidden.length ? names.find((one) => hidden.every((word) => one.includes(word))) : undefined;
      row.hidden = hidden.length > 0 && name === undefined;
      row.querySelector(".found")?.remove();
      if (name !== undefined) {
        const found = document.createElement("code");
        found.className = "found";
        found.textContent = `among them ${name}`;
        row.querySelector("th").append(found);
      }
      count += !row.hidden;
    }
    for (const table of document.querySelectorAll("table.searched"))
      table.parentElement.hidden = !table.querySelector("tbody tr:not([hidden])");
    output.textContent = words.length ? `${count} of ${rows.length} rows` : "";
  };
  search.hidden = false;
  search.addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("input", filter);
})();
