// Markup as templates: html`<b>${text}</b>`. A value in ${} is text or an element, never markup.
import { Component, h } from "./vendor/preact.js";
import { htm } from "./vendor/htm.js";

export const html = htm.bind(h);

// A component that is rendered again only if one of its properties changes.
export function pure(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      for (const name in next) if (next[name] !== this.props[name]) return true;
      return false;
    }
    render(props) {
      return draw(props);
    }
  };
}
