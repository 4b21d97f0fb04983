// Live updates, selections, keyboard shortcuts. Every page can be read, and every form sent, without this script.
"use strict";

// --- The parts of a page that change: the server sends them whenever they differ from what it sent before. ---

const main = document.querySelector("main");
const button = document.querySelector("button.live");
let source = null;
let wait = 1000;

/** The id of a node. Not `node.id`: in a form with a field that is named `id`, that is the field. */
function idOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("id") : null;
}

/** Changes `now` into `next`, keeping focus, selections, open details, and what was typed. */
function morph(now, next) {
  if (now.nodeType !== next.nodeType || now.nodeName !== next.nodeName || idOf(now) !== idOf(next)) {
    now.replaceWith(next.cloneNode(true));
    return;
  }
  if (now.nodeType !== Node.ELEMENT_NODE) {
    if (now.nodeValue !== next.nodeValue) now.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...now.attributes]) {
    if (!next.hasAttribute(name) && !kept(now, name)) now.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (now.getAttribute(name) !== value && !kept(now, name)) now.setAttribute(name, value);
  }
  if (now.nodeName === "TEXTAREA" || now.nodeName === "SELECT") return;
  // Rows and cards have ids, so one that has a new position is moved, not replaced. Removed ones go first, so that the
  // others need not move: a move would take the focus from them.
  const wantedIds = new Set([...next.children].map(idOf));
  for (const child of [...now.children]) if (idOf(child) && !wantedIds.has(idOf(child))) child.remove();
  const named = new Map();
  for (const child of now.children) if (idOf(child)) named.set(idOf(child), child);
  let node = now.firstChild;
  for (const wanted of [...next.childNodes]) {
    const same = named.get(idOf(wanted));
    if (same && same !== node) now.insertBefore(same, node);
    if (same) {
      node = same.nextSibling;
      morph(same, wanted);
    } else if (node && !idOf(node)) {
      const after = node.nextSibling;
      morph(node, wanted);
      node = after;
    } else {
      now.insertBefore(wanted.cloneNode(true), node);
    }
  }
  while (node) {
    const after = node.nextSibling;
    node.remove();
    node = after;
  }
}

/** True for attributes that the user controls. */
function kept(element, attribute) {
  return (element.nodeName === "DETAILS" && attribute === "open")
    || (element.nodeName === "INPUT" && element.type !== "hidden" && (attribute === "value" || attribute === "checked"))
    || attribute === "aria-selected";
}

function show(state, text) {
  if (!button) return;
  button.dataset.state = state;
  button.textContent = text;
}

function connect() {
  if (!main || !main.dataset.live || !window.EventSource) return;
  source = new EventSource(main.dataset.live);
  source.addEventListener("open", () => {
    wait = 1000;
    show("live", "live");
  });
  source.addEventListener("page", (event) => {
    const page = new DOMParser().parseFromString(event.data, "text/html").querySelector("main");
    if (page) {
      morph(main, page);
      count();
    }
  });
  // The server ends the connection from time to time, to check the access of the user again.
  source.addEventListener("again", () => {
    disconnect();
    connect();
  });
  source.addEventListener("gone", () => {
    disconnect();
    show("paused", "reload");
  });
  source.addEventListener("error", () => {
    // The browser by itself would connect again at once, or, after some errors, never.
    source.close();
    show("lost", "lost");
    source = { close: ((timer) => () => clearTimeout(timer))(setTimeout(connect, wait)) };
    wait = Math.min(wait * 2, 15000);
  });
}

function disconnect() {
  if (source) source.close();
  source = null;
}

if (button) {
  button.addEventListener("click", () => {
    if (button.textContent === "reload") return location.reload();
    if (source) {
      disconnect();
      show("paused", "paused");
    } else {
      connect();
      show("live", "live");
    }
  });
}
// A hidden page costs the database nothing.
document.addEventListener("visibilitychange", () => {
  if (button && button.dataset.state === "paused") return;
  disconnect();
  if (!document.hidden) connect();
});
connect();

// --- Selections of jobs ---

function boxes() {
  return [...document.querySelectorAll("input[name=id]")];
}

function count() {
  const chosen = boxes().filter((box) => box.checked);
  for (const box of boxes()) {
    const row = box.closest("tr");
    if (box.checked) row.setAttribute("aria-selected", "true");
    else row.removeAttribute("aria-selected");
  }
  for (const counter of document.querySelectorAll("[data-chosen]")) counter.textContent = String(chosen.length);
  for (const it of document.querySelectorAll("[data-needs-chosen]")) it.disabled = chosen.length === 0;
  const all = document.querySelector("input[data-all]");
  if (all) {
    all.checked = chosen.length > 0 && chosen.length === boxes().length;
    all.indeterminate = chosen.length > 0 && chosen.length < boxes().length;
  }
}

document.addEventListener("change", (event) => {
  if (event.target.matches("input[data-all]")) {
    for (const box of boxes()) box.checked = event.target.checked;
  }
  count();
});
count();

// --- Questions before actions that cannot be undone; buttons that copy ---

document.addEventListener("submit", (event) => {
  const asked = event.submitter && event.submitter.dataset.ask;
  if (asked && !window.confirm(asked)) event.preventDefault();
});

document.addEventListener("click", (event) => {
  const from = event.target.closest && event.target.closest("button[data-copy]");
  if (!from || !navigator.clipboard) return;
  navigator.clipboard.writeText(from.dataset.copy).then(() => {
    const was = from.textContent;
    from.textContent = "copied";
    setTimeout(() => { from.textContent = was; }, 1200);
  });
});

// --- Light and dark ---

const themes = ["", "light", "dark"];
const theme = document.querySelector("button.theme");
function setTheme(name) {
  document.documentElement.style.colorScheme = name;
  if (theme) theme.textContent = { "": "◐", light: "☀", dark: "☾" }[name];
  if (theme) theme.setAttribute("aria-label", "Colours: " + (name || "system"));
}
let chosenTheme = "";
try { chosenTheme = localStorage.getItem("rouse-theme") || ""; } catch { /* Storage can be forbidden. */ }
setTheme(themes.includes(chosenTheme) ? chosenTheme : "");
if (theme) {
  theme.addEventListener("click", () => {
    chosenTheme = themes[(themes.indexOf(chosenTheme) + 1) % themes.length];
    setTheme(chosenTheme);
    try { localStorage.setItem("rouse-theme", chosenTheme); } catch { /* As above. */ }
  });
}

// --- Keyboard shortcuts: `g` and a letter (a page), `/` (search), `p` (pause), `j` and `k` (rows). ---

let went = 0;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "g") {
    went = Date.now();
    return;
  }
  if (Date.now() - went < 1500) {
    went = 0;
    const link = document.querySelector(`nav.pages a[data-key="${CSS.escape(event.key)}"]`);
    if (link) link.click();
    return;
  }
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (event.key === "p" && button) {
    button.click();
  } else if (event.key === "j" || event.key === "k") {
    const links = [...document.querySelectorAll("tbody tr a.row")];
    const at = links.indexOf(document.activeElement);
    const next = links[event.key === "j" ? at + 1 : Math.max(at - 1, 0)];
    if (next) next.focus();
  } else if (event.key === "?") {
    const help = document.querySelector("dialog.keys");
    if (help) help.showModal();
  }
});
