// Shows deliveries as they happen, and refreshes what the page says about them.
"use strict";

const feed = document.getElementById("feed");
const connection = document.getElementById("connection");
const KEPT = 12;

const source = new EventSource(feed.dataset.stream);
source.onopen = () => { connection.textContent = "connected"; };
source.onerror = () => { connection.textContent = "reconnecting"; };
source.addEventListener("delivered", event => {
  feed.prepend(line(JSON.parse(event.data)));
  while (feed.children.length > KEPT) feed.lastElementChild.remove();
  refreshSoon();
});

function line(delivery) {
  const item = document.createElement("li");
  item.className = "new";
  item.append(element("b", delivery.topic), " ", element("time", new Date(delivery.at).toLocaleTimeString("en-GB")),
    " ", element("code", delivery.key));
  return item;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text; // never markup: keys and topics come from elsewhere
  return made;
}

let timer;
function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    const answer = await fetch(location.href);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-refresh]");
    if (fresh) document.querySelector("[data-refresh]").replaceWith(fresh);
  }, 300);
}
