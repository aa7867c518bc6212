// Loads a library that is large and rarely needed when it is first used.
//
//   const temml = await load("temml", "temml.js");

const loads = new Map();

export function load(name, file) {
  if (globalThis[name]) return Promise.resolve(globalThis[name]);
  if (!loads.has(name))
    loads.set(name, new Promise((found, failed) => {
      const script = document.createElement("script");
      script.src = `/page/vendor/${file}`;
      script.onload = () => found(globalThis[name]);
      script.onerror = () => failed(new Error(`${file} cannot be loaded`));
      document.head.append(script);
    }));
  return loads.get(name);
}
