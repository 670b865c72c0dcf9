"use strict";
// Numbers with units, as the reports write them.
function bytes(n) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (n >= scale * 0.99995) return (n / scale).toFixed(1) + " " + unit;
  return Math.ceil(n) + " bytes";
}
function duration(us) {
  if (us < 1e3) return us.toFixed(1) + " µs";
  if (us < 1e6) return (us / 1e3).toFixed(2) + " ms";
  return (us / 1e6).toFixed(3) + " s";
}
function element(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given))
    name in made && name !== "list" ? (made[name] = value) : made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}
// What the page was made with: JSON, packed by zlib.
async function data() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).json();
}
let drawn; // a promise, for those who wait for the picture
function draws(draw) {
  drawn = data().then(draw).catch((error) => {
    const said = "This browser cannot draw the picture (" + error + "). What it shows stands below in words.";
    document.body.prepend(element("p", {}, said));
    throw error;
  });
}
