"use strict";
// Keeps the part of the page that is called "live" up to date. Without it, the page works, and is as old as it says.
const live = document.getElementById("live");
const control = document.getElementById("update");
const news = document.getElementById("news");

async function update() {
  // Replacing what has the focus would take it from the reader.
  if (!control.checked || document.hidden || live.contains(document.activeElement)) return;
  try {
    const response = await fetch(location.href);
    if (!response.ok) throw new Error(`status ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    live.replaceChildren(...page.getElementById("live").childNodes);
    news.textContent = "";
  } catch (error) {
    news.textContent = `The page cannot be updated: ${error.message}. It shows what it had before.`;
  }
}

document.getElementById("control").hidden = false;
setInterval(update, Number(live.dataset.seconds) * 1000);
