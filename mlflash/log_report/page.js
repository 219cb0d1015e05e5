// Titles of drawings at once, also where there is no mouse. Without this script the browser shows them a bit later.
(() => {
  const tip = document.getElementById("tip");
  let shown = null;
  const hide = () => {
    if (shown) shown.title.textContent = shown.text;
    shown = null;
    tip.hidden = true;
  };
  const show = (event) => {
    const part = event.target.closest("svg *");
    const title = part && part.querySelector(":scope > title");
    if (shown && (!title || title !== shown.title)) hide();
    if (!title) return;
    if (!shown) {
      shown = { title, text: title.textContent };
      tip.textContent = shown.text;
      title.textContent = "";
      tip.hidden = false;
    }
    const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${top}px`;
  };
  for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, show);
  for (const name of ["pointerleave", "scroll"]) document.addEventListener(name, hide, true);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
})();
