// Markup as templates: html`<b>${text}</b>`. What stands in ${} is text or an element, never markup.
import { Component, h } from "./vendor/preact.js";
import { htm } from "./vendor/htm.js";

export const html = htm.bind(h);

// A component that is drawn again only when one of its properties is another.
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
