"use strict";
// Draws the rows of the Gantt on a canvas, at any zoom. All names go in as text, never as HTML.
(() => {
  const source = document.getElementById("gantt-data");
  const canvas = document.getElementById("gantt-canvas");
  if (!source || !canvas) return;
  const began = performance.now();
  const data = JSON.parse(source.textContent);
  const bytesOf = (text) => {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out.buffer;
  };
  const start = new Uint32Array(bytesOf(data.start)), length = new Uint32Array(bytesOf(data.length));
  const opOf = new Uint32Array(bytesOf(data.op)), style = new Uint8Array(bytesOf(data.style));
  const sizes = new Float32Array(bytesOf(data.bytes)), ptr = data.row_ptr;
  const moduleOf = new Uint32Array(bytesOf(data.module_of));
  const kindOf = data.kind_bits === 16 ? new Uint16Array(bytesOf(data.kind_of)) : new Uint32Array(bytesOf(data.kind_of));
  const WHOLE = 4294967295, numRows = ptr.length - 1, numSpans = start.length;
  const busy = new Float64Array(numSpans + 1); // seconds of all spans before, in shares of the whole
  for (let i = 0; i < numSpans; i++) busy[i + 1] = busy[i] + length[i];
  const hasPath = style.some((s) => s & 8);

  const box = document.getElementById("gantt-box"), said = document.getElementById("gantt-said");
  const tip = document.getElementById("tip-box"), ctx = canvas.getContext("2d");
  document.documentElement.classList.add("js");
  const AXIS = 24, GAP = 4;
  let titleWidth = 150, width = 0, height = 0, ratio = 1, colours = {}, rowTop = [], rowHeight = [], laneTop = [], laneHeight = [];
  const shownLanes = [];
  let from = 0, to = 1, chosen = -1, onlyPath = false, found = null, queued = false, lastDraw = 0;

  const readColours = () => {
    const css = getComputedStyle(document.documentElement), get = (name) => css.getPropertyValue(name).trim();
    colours = { bg: get("--bg"), fg: get("--fg"), dim: get("--dim"), line: get("--line"), lane: get("--lane"), ink: get("--ink"),
      accent: get("--accent"), spans: data.classes.map((_, i) => get("--c" + i)) };
  };
  const layOut = () => {
    width = box.clientWidth;
    titleWidth = (width < 560 ? 84 : 172) + (many ? 40 : 0);
    ratio = window.devicePixelRatio || 1;
    let y = AXIS, row = 0;
    laneTop = []; laneHeight = []; rowTop = []; rowHeight = [];
    for (const lane of data.lanes) {
      const tall = lane[2] ? Math.max(14, 8 * lane[3]) : 26;
      laneTop.push(y); laneHeight.push(tall);
      for (let k = 0; k < lane[3]; k++, row++) { rowTop.push(y + k * tall / lane[3]); rowHeight.push(tall / lane[3]); }
      y += tall + GAP;
    }
    height = y + 2;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  };
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const seconds = (s, digits = 3) => {
    if (!s) return "0 s";
    const [scale, unit] = units.find((u) => Math.abs(s) >= u[0]) || units[3];
    return Number((s / scale).toPrecision(digits)) + " " + unit;
  };
  const size = (b) => {
    let at = 0;
    while (b >= 1024 && at < 4) { b /= 1024; at++; }
    return b.toFixed(at ? 1 : 0) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][at];
  };
  // The first span of a row that ends after t (shares of the whole).
  const firstAfter = (row, t) => {
    let lo = ptr[row], hi = ptr[row + 1];
    while (lo < hi) { const mid = (lo + hi) >> 1; if (start[mid] + length[mid] > t) hi = mid; else lo = mid + 1; }
    return lo;
  };
  const firstFrom = (lo, hi, t) => { // the first span in [lo, hi) that starts at t or later; gallops
    let step = 1, at = lo;
    while (at + step < hi && start[at + step] < t) { at += step; step *= 2; }
    hi = Math.min(hi, at + step);
    while (at < hi) { const mid = (at + hi) >> 1; if (start[mid] < t) at = mid + 1; else hi = mid; }
    return at;
  };
  const drawRow = (row, scale, t0, t1) => {
    const y = rowTop[row], tall = rowHeight[row] - (rowHeight[row] > 9 ? 1 : 0), last = ptr[row + 1], perPixel = 1 / scale;
    let i = firstAfter(row, t0), pen = -1, alpha = 1;
    while (i < last && start[i] < t1) {
      const x0 = (start[i] - t0) * scale, x1 = x0 + length[i] * scale;
      let dim = onlyPath && !(style[i] & 8), kind = style[i] & 7;
      if (found) dim = !found.has(opOf[i]);
      let left = x0, wide = x1 - x0, cover = 1, next = i + 1;
      if (wide < 1) { // all that begins within a pixel becomes one mark, as strong as it is busy
        next = Math.max(i + 1, firstFrom(i, last, start[i] + perPixel));
        const end = start[next - 1] + length[next - 1] - start[i];
        cover = end > 0 ? Math.min(1, 0.2 + 0.8 * (busy[next] - busy[i]) / end) : 0.2;
        wide = Math.max(end * scale, 0.8);
        if (next - i > 1) {
          let most = -1;
          for (let k = i, stop = Math.min(next, i + 64); k < stop; k++) {
            if ((onlyPath && style[k] & 8) || (found && found.has(opOf[k]))) { dim = false; kind = style[k] & 7; break; }
            if (length[k] > most) { most = length[k]; kind = style[k] & 7; }
          }
        }
      }
      const strength = dim ? 0.14 : cover;
      if (strength !== alpha) ctx.globalAlpha = alpha = strength;
      if (kind !== pen) ctx.fillStyle = colours.spans[pen = kind];
      left = Math.max(left, -2);
      wide = Math.min(x0 + wide, (t1 - t0) * scale + 2) - left;
      ctx.fillRect(titleWidth + left, y, Math.max(wide - (wide > 3 ? 0.6 : 0), 0.7), tall);
      if (wide > (data.short ? 18 : 46) && tall > 11) {
        ctx.globalAlpha = alpha = dim ? 0.4 : 1;
        ctx.fillStyle = kind ? "#14171b" : colours.ink; pen = -1; // dark is read best on all but the first
        const name = data.names[opOf[i]], text = data.short ? name.split(" of ")[0].split(": ").pop() : name, room = wide - (data.short ? 4 : 8);
        ctx.fillText(fit(text, room), titleWidth + left + 4, y + tall / 2 + 4);
      }
      i = next;
    }
    ctx.globalAlpha = 1;
  };
  // As much of a text as a width has room for, in the font that is set.
  const fit = (text, room) => {
    if (ctx.measureText(text).width <= room) return text;
    let lo = 0, hi = text.length;
    while (lo < hi) { const mid = (lo + hi + 1) >> 1; if (ctx.measureText(text.slice(0, mid) + "…").width <= room) lo = mid; else hi = mid - 1; }
    return text.slice(0, lo) + "…";
  };
  // The same with the middle left out: names of channels differ at their end.
  const fitMiddle = (text, room) => {
    if (ctx.measureText(text).width <= room) return text;
    let keep = text.length - 1;
    const cut = () => text.slice(0, Math.ceil(keep / 3)) + "…" + text.slice(text.length - Math.floor(2 * keep / 3));
    while (keep > 3 && ctx.measureText(cut()).width > room) keep--;
    return cut();
  };
  // The name of a lane: both ends of a link and the word of its timeline stay readable, however long names are.
  const laneText = (title, series, room) => {
    const end = many ? " · " + (width < 560 ? series.slice(0, 4) + "." : series) : "";
    if (ctx.measureText(title + end).width <= room) return title + end;
    const left = room - ctx.measureText(end).width, [from, to] = title.split(" → ");
    if (to === undefined) return fitMiddle(title, left) + end;
    const half = (left - ctx.measureText(" → ").width) / 2, shortFrom = fit(from, Math.max(half, 2 * half - ctx.measureText(to).width));
    return shortFrom + " → " + fit(to, 2 * half - ctx.measureText(shortFrom).width) + end;
  };
  const drawAxis = (inner) => {
    const span = (to - from) * data.end_s;
    if (!(span > 0)) return;
    const raw = span / Math.max(2, inner / 110), power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((n) => power * n >= raw);
    const digits = Math.max(3, Math.ceil(Math.log10(to * data.end_s / step)) + 1);
    ctx.textAlign = "center";
    for (let at = Math.ceil(from * data.end_s / step) * step; at <= to * data.end_s; at += step) {
      const x = titleWidth + (at / data.end_s - from) / (to - from) * inner;
      ctx.fillStyle = colours.line; ctx.fillRect(x, AXIS - 5, 1, height);
      ctx.fillStyle = colours.dim; ctx.fillText(seconds(at, digits), Math.min(x, width - 26), 14);
    }
    ctx.textAlign = "left";
  };
  const draw = () => {
    queued = false;
    const t = performance.now(), inner = width - titleWidth - 8, t0 = from * WHOLE, t1 = to * WHOLE, scale = inner / (t1 - t0);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = colours.bg; ctx.fillRect(0, 0, width, height);
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillStyle = colours.lane;
    for (let l = 0; l < data.lanes.length; l++) ctx.fillRect(titleWidth, laneTop[l], inner, laneHeight[l]);
    drawAxis(inner);
    ctx.save(); ctx.beginPath(); ctx.rect(titleWidth, AXIS - 2, inner, height); ctx.clip();
    for (let row = 0; row < numRows; row++) drawRow(row, scale, t0, t1);
    if (chosen >= 0) {
      const row = rowOf(chosen), x = titleWidth + (start[chosen] - t0) * scale;
      ctx.strokeStyle = colours.fg; ctx.lineWidth = 2;
      ctx.strokeRect(x, rowTop[row] - 1, Math.max(length[chosen] * scale, 2), rowHeight[row] + 1);
    }
    ctx.restore();
    ctx.textAlign = "right";
    for (let l = 0; l < data.lanes.length; l++) {
      const [title, series, link] = data.lanes[l];
      ctx.fillStyle = link ? colours.dim : colours.fg;
      ctx.font = (link ? "" : "600 ") + (width < 560 ? "10px" : "12px") + " system-ui, sans-serif";
      ctx.fillText(shownLanes[l] = laneText(title, series, titleWidth - 14), titleWidth - 8, laneTop[l] + laneHeight[l] / 2 + 4);
    }
    ctx.textAlign = "left";
    lastDraw = performance.now() - t;
  };
  const many = new Set(data.lanes.map((lane) => lane[1])).size > 1;
  const redraw = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const look = (a, b) => {
    const least = 1e-9, wide = Math.min(1, Math.max(b - a, least));
    from = Math.min(Math.max(0, a), 1 - wide); to = from + wide;
    redraw();
  };
  const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
  const pan = (share) => look(from + (to - from) * share, to + (to - from) * share);
  const rowOf = (span) => {
    let lo = 0, hi = numRows - 1;
    while (lo < hi) { const mid = (lo + hi + 1) >> 1; if (ptr[mid] <= span) lo = mid; else hi = mid - 1; }
    return lo;
  };
  const at = (x) => from + (x - titleWidth) / (width - titleWidth - 8) * (to - from);
  // The span under a point of the canvas: of several in a pixel the longest.
  const spanAt = (x, y) => {
    if (x < titleWidth) return -1;
    for (let row = 0; row < numRows; row++) {
      if (y < rowTop[row] || y >= rowTop[row] + rowHeight[row]) continue;
      const t0 = at(x - 1.5) * WHOLE, t1 = at(x + 1.5) * WHOLE, mid = at(x) * WHOLE;
      let best = -1;
      for (let i = firstAfter(row, t0), n = 0; i < ptr[row + 1] && start[i] <= t1 && n < 5000; i++, n++) {
        if (start[i] <= mid && mid < start[i] + length[i] && length[i] > (t1 - t0) / 3) return i;
        if (best < 0 || length[i] > length[best]) best = i;
      }
      return best;
    }
    return -1;
  };
  const describe = (i) => {
    const op = opOf[i], lane = data.lanes[data.row_lane[rowOf(i)]], unit = data.end_s / WHOLE;
    const begin = start[i] * unit, took = length[i] * unit, moved = (style[i] & 7) === 4;
    const lines = [data.kinds[kindOf[op]] + (data.modules[moduleOf[op]] ? " in " + data.modules[moduleOf[op]] : ""),
      (moved ? "sent " : "on ") + lane[0] + (many ? " (" + lane[1] + ")" : ""),
      seconds(begin, 6) + " to " + seconds(begin + took, 6) + ": " + seconds(took, 4),
      (moved ? "" : "makes ") + size(sizes[i])];
    if (style[i] & 8) lines.push("on the critical path");
    return [(moved ? "output of " : "") + data.names[op], lines.join("\n")];
  };
  const show = (i, x, y) => {
    const [name, text] = describe(i);
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: name }), document.createTextNode(text));
    tip.style.display = "block";
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + "px";
  };
  const choose = (i) => {
    chosen = i;
    if (i < 0) return redraw();
    const [name, text] = describe(i), a = start[i] / WHOLE, b = (start[i] + length[i]) / WHOLE;
    said.textContent = name + ": " + text.split("\n").join("; ");
    if (a < from || b > to) { const wide = Math.max(to - from, (b - a) * 1.2); look((a + b - wide) / 2, (a + b + wide) / 2); }
    redraw();
  };
  const spot = (event) => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  let drag = null, moved = false;
  canvas.addEventListener("pointerdown", (event) => { drag = [event.clientX, from, to]; moved = false; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = spot(event);
    if (drag) {
      const shift = (drag[0] - event.clientX) / (width - titleWidth - 8) * (drag[2] - drag[1]);
      if (Math.abs(event.clientX - drag[0]) > 3) { moved = true; canvas.classList.add("drag"); tip.style.display = "none"; look(drag[1] + shift, drag[2] + shift); }
      return;
    }
    const i = spanAt(x, y);
    if (i >= 0) show(i, event.clientX, event.clientY); else tip.style.display = "none";
  });
  const release = (event) => {
    if (drag && !moved && event.type === "pointerup") choose(spanAt(...spot(event)));
    drag = null; canvas.classList.remove("drag");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 2 : 0.4, at(spot(event)[0])));
  canvas.addEventListener("wheel", (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / width);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-80, Math.min(80, event.deltaY)) / 160), at(spot(event)[0]));
    }
  }, { passive: false });
  const step = (by) => {
    if (!numSpans) return;
    if (chosen < 0) { // the first in view
      for (let row = 0; row < numRows; row++) { const i = firstAfter(row, from * WHOLE); if (i < ptr[row + 1]) return choose(i); }
      return choose(0);
    }
    const row = rowOf(chosen);
    choose(Math.min(Math.max(chosen + by, ptr[row]), ptr[row + 1] - 1));
  };
  const lane = (by) => {
    const t = chosen < 0 ? from * WHOLE : start[chosen];
    for (let row = (chosen < 0 ? -1 : rowOf(chosen)) + by; row >= 0 && row < numRows; row += by) {
      if (ptr[row + 1] === ptr[row]) continue;
      return choose(Math.min(firstAfter(row, t), ptr[row + 1] - 1));
    }
  };
  const keys = { ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => look(0, 1), Home: () => look(0, to - from), End: () => look(1 - (to - from), 1), ".": () => step(1), ",": () => step(-1),
    ArrowUp: () => lane(-1), ArrowDown: () => lane(1), Escape: () => { tip.style.display = "none"; choose(-1); } };
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key] && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
  });
  const on = (id, act) => document.getElementById(id)?.addEventListener("click", act);
  on("zoom-in", () => zoom(0.5)); on("zoom-out", () => zoom(2)); on("zoom-all", () => look(0, 1));
  on("pan-left", () => pan(-0.3)); on("pan-right", () => pan(0.3));
  const pathButton = document.getElementById("only-path");
  pathButton.hidden = !hasPath;
  on("only-path", () => { onlyPath = !onlyPath; pathButton.setAttribute("aria-pressed", onlyPath); redraw(); });
  const search = document.getElementById("find-op");
  search.addEventListener("input", () => {
    const word = search.value.trim().toLowerCase();
    if (!word) { found = null; said.textContent = ""; return redraw(); }
    const modules = data.modules.map((name) => name.toLowerCase().includes(word));
    found = new Set();
    for (let op = 0; op < data.names.length; op++) if (modules[moduleOf[op]] || data.names[op].toLowerCase().includes(word)) found.add(op);
    said.textContent = found.size + " of " + data.names.length + " ops match; Enter shows the next";
    redraw();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !found || !found.size) return;
    for (let k = 1; k <= numSpans; k++) {
      const i = (Math.max(chosen, 0) + k) % numSpans;
      if (found.has(opOf[i]) && (style[i] & 7) !== 4) { const a = start[i] / WHOLE, b = a + length[i] / WHOLE, m = Math.max((b - a) * 12, 1e-4); look(a - m, b + m); return choose(i); }
    }
  });
  const refresh = () => { readColours(); layOut(); draw(); };
  window.addEventListener("resize", refresh);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  refresh();
  window.loadmasterGantt = { lanes: () => shownLanes, look, zoom, pan, spanAt, describe, draw, choose, view: () => [from, to], frame: () => lastDraw, numSpans,
    first: performance.now(), took: performance.now() - began,
    centre: (i) => { const r = rowOf(i); return [titleWidth + ((start[i] + length[i] / 2) / WHOLE - from) / (to - from) * (width - titleWidth - 8), rowTop[r] + rowHeight[r] / 2]; } };
})();
