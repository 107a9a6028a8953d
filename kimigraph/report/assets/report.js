"use strict";
(() => {
  const PAGE = 150; // hunks that are drawn at once
  const passes = [...document.querySelectorAll(".pass")];
  const help = document.getElementById("help");
  let here = -1;

  const make = (tag, kind, text) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  // The unified text as hunks of {place, old, new, lines}.
  const hunksOf = (text) => {
    const hunks = [];
    for (const line of text.split("\n")) {
      const head = /^@@ -(\d+),\d+ \+(\d+),\d+ @@/.exec(line);
      if (head) hunks.push({ old: +head[1], new: +head[2], lines: [] });
      else if (hunks.length) hunks[hunks.length - 1].lines.push(line);
    }
    return hunks;
  };

  // A changed line with the part that differs from its partner marked.
  const marked = (kind, text, partner) => {
    const cell = make("div", kind);
    if (partner === undefined) {
      cell.textContent = text;
      return cell;
    }
    const least = Math.min(text.length, partner.length);
    let start = 0;
    while (start < least && text[start] === partner[start]) start++;
    let end = 0;
    while (end < least - start && text[text.length - 1 - end] === partner[partner.length - 1 - end]) end++;
    if (start + end < text.length / 4) {
      cell.textContent = text;
      return cell;
    }
    cell.append(text.slice(0, start), make("mark", "", text.slice(start, text.length - end)), text.slice(text.length - end));
    return cell;
  };

  const rowOf = (oldLine, oldText, newLine, newText) => {
    const same = oldText !== undefined && oldText === newText;
    const row = make("div", same ? "row same" : "row");
    const paired = !same && oldText !== undefined && newText !== undefined;
    const side = (kind, line, text, partner, right) => {
      const extra = right ? " right" : "";
      if (text === undefined) {
        row.append(make("div", "line empty" + extra), make("div", "empty" + extra));
        return;
      }
      row.append(make("div", "line" + extra, line));
      row.append(marked(kind + (same ? "" : " changed") + extra, text, paired ? partner : undefined));
    };
    side("old", oldLine, oldText, newText, false);
    side("new", newLine, newText, oldText, true);
    return row;
  };

  const hunkOf = (hunk) => {
    const box = make("div", "hunk");
    box.append(make("div", "place", `line ${hunk.old} → ${hunk.new}`));
    let [oldLine, newLine, gone, come] = [hunk.old, hunk.new, [], []];
    const flush = () => {
      const block = make("div", "block");
      for (let i = 0; i < Math.max(gone.length, come.length); i++) {
        block.append(rowOf(i < gone.length ? oldLine++ : "", gone[i], i < come.length ? newLine++ : "", come[i]));
      }
      if (block.childElementCount) box.append(block);
      [gone, come] = [[], []];
    };
    for (const line of hunk.lines) {
      const text = line.slice(1);
      if (line[0] === "-") {
        if (come.length) flush();
        gone.push(text);
      } else if (line[0] === "+") come.push(text);
      else {
        flush();
        box.append(rowOf(oldLine++, text, newLine++, text));
      }
    }
    flush();
    return box;
  };

  // Draw the difference of a pass when it is first opened: the plain text stays for readers without scripts.
  const draw = (pass) => {
    const plain = pass.querySelector("pre.diff");
    if (!plain) return;
    const hunks = hunksOf(plain.textContent);
    const view = make("div", "view");
    const more = make("button");
    let shown = 0;
    const next = () => {
      for (const hunk of hunks.slice(shown, shown + PAGE)) view.append(hunkOf(hunk));
      shown = Math.min(shown + PAGE, hunks.length);
      more.textContent = `show more places (${hunks.length - shown} left)`;
      more.hidden = shown === hunks.length;
    };
    more.addEventListener("click", next);
    next();
    plain.replaceWith(view, more);
  };

  const show = (index, open) => {
    if (!passes.length) return;
    here = Math.max(0, Math.min(passes.length - 1, index));
    passes.forEach((pass, i) => pass.classList.toggle("here", i === here));
    if (open) passes[here].open = true;
    const summary = passes[here].querySelector("summary");
    summary.focus({ preventScroll: true });
    passes[here].scrollIntoView({ block: "start" });
  };

  const keys = {
    j: () => show(here + 1, true),
    k: () => show(here < 0 ? passes.length - 1 : here - 1, true),
    o: () => { if (here < 0) show(0, false); if (here >= 0) passes[here].open = !passes[here].open; },
    a: () => { const open = !passes.every((pass) => pass.open); passes.forEach((pass) => { pass.open = open; }); },
    u: () => document.body.classList.toggle("single"),
    g: () => { here = -1; passes.forEach((pass) => pass.classList.remove("here")); window.scrollTo(0, 0); },
    "?": () => (help.open ? help.close() : help.showModal()),
  };

  passes.forEach((pass, index) => {
    pass.addEventListener("toggle", () => { if (pass.open) draw(pass); });
    pass.querySelector("summary").addEventListener("focus", () => {
      here = index;
      passes.forEach((other, i) => other.classList.toggle("here", i === here));
    });
  });
  document.getElementById("keys").addEventListener("click", keys["?"]);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (help.open && event.key !== "?") return;
    const action = keys[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
  const linked = () => {
    const index = passes.findIndex((pass) => `#${pass.id}` === location.hash);
    if (index >= 0) show(index, true);
  };
  window.addEventListener("hashchange", linked);
  linked();
})();
