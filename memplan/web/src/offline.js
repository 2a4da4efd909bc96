// Keeps every file of the page at the first visit, so that the page works without a network after it.
const VERSION = "__VERSION__";
const KEPT = ["__KEPT__"];

self.addEventListener("install", (event) => {
  event.waitUntil(
    caches
      .open(VERSION)
      .then((cache) => cache.addAll(KEPT.map((url) => new Request(url, { cache: "no-cache" }))))
      .then(() => self.skipWaiting()),
  );
});

self.addEventListener("activate", (event) => {
  event.waitUntil(
    caches
      .keys()
      .then((names) => Promise.all(names.filter((name) => name !== VERSION).map((name) => caches.delete(name))))
      .then(() => self.clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || new URL(event.request.url).origin !== self.location.origin) return;
  event.respondWith(
    caches.open(VERSION).then(async (cache) => {
      const asked = event.request.mode === "navigate" ? "./" : event.request;
      const found = await cache.match(asked, { ignoreSearch: true });
      return found ?? fetch(event.request);
    }),
  );
});
