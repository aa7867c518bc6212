// A long list of rows of equal height: only visible rows are elements, which are reused while scrolling.
//
//   <Recycled count=${12500} height=${32} row=${(at) => html`...`} active=${3} onRange=${(first, last) => ...} />
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
import { html } from "./html.js";

const BEYOND = 6;
const places = new Map();

export function Recycled({ count, height, row, active = -1, onRange, name = "", ...rest }) {
  const box = useRef(null);
  const [view, set] = useState({ top: places.get(name) || 0, size: 800 });
  const first = Math.max(0, Math.floor(view.top / height) - BEYOND);
  const last = Math.min(count, Math.ceil((view.top + view.size) / height) + BEYOND);

  useLayoutEffect(() => {
    const element = box.current;
    const measure = () => set((before) => ({ ...before, size: element.clientHeight }));
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    let frame = 0;
    const scrolled = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        places.set(name, element.scrollTop);
        set((before) => ({ ...before, top: element.scrollTop }));
      });
    };
    element.addEventListener("scroll", scrolled, { passive: true });
    return () => {
      observer.disconnect();
      cancelAnimationFrame(frame);
      element.removeEventListener("scroll", scrolled);
    };
  }, [name]);

  // Restores the position once there are rows to scroll to.
  useLayoutEffect(() => {
    const kept = places.get(name) || 0;
    if (box.current.scrollTop !== kept) box.current.scrollTop = kept;
  }, [name, count > 0]);

  useEffect(() => onRange?.(first, last), [first, last, onRange]);

  useLayoutEffect(() => {
    if (active < 0) return;
    const [top, size] = [box.current.scrollTop, box.current.clientHeight];
    if (active * height < top) box.current.scrollTop = active * height;
    else if ((active + 1) * height > top + size) box.current.scrollTop = (active + 1) * height - size;
  }, [active, height]);

  const pool = last - first + 1;
  const shown = [];
  for (let at = first; at < last; at += 1)
    shown.push(html`<div class="slot" role="presentation" key=${at % pool} style=${{ transform: `translateY(${at * height}px)`, height: `${height}px` }}>
      ${row(at)}
    </div>`);
  return html`<div class="recycled" ref=${box} ...${rest}>
    <div class="tall" role="presentation" style=${{ height: `${count * height}px` }}>${shown}</div>
  </div>`;
}

// Scrolls to the beginning, because the list is a different one now.
export function toTop(name) {
  places.delete(name);
}
