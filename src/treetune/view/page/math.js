// Formulas as MathML, by Temml. Its tree is rebuilt here from elements and attributes that are known to be harmless:
// nothing in a formula becomes a link, a script or a style sheet.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  ("math semantics mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle merror mpadded mphantom msub msup msubsup munder " +
    "mover munderover mmultiscripts mprescripts mtable mtr mtd menclose").split(" "),
);
const ATTRIBUTES = new Set(
  ("accent accentunder columnalign columnspan columnspacing rowspacing columnlines rowlines depth display displaystyle fence form " +
    "height largeop linethickness lspace mathvariant maxsize minsize movablelimits notation rowspan rspace scriptlevel " +
    "separator stretchy symmetric voffset width encoding").split(" "),
);
const STYLES = new Set(
  ("color fontWeight fontStyle fontSize fontFamily textAlign padding paddingLeft paddingRight paddingTop paddingBottom margin " +
    "marginLeft marginRight border borderTop borderBottom borderLeft borderRight width display mathStyle mathDepth verticalAlign").split(" "),
);
const LONGEST = 5000;
const DEEPEST = 120;

function build(node, depth) {
  if (node.text !== undefined) return document.createTextNode(node.text);
  const parts = document.createDocumentFragment();
  const element = ELEMENTS.has(node.type) && depth < DEEPEST ? document.createElementNS(MATHML, node.type) : parts;
  if (element !== parts) {
    for (const [name, value] of Object.entries(node.attributes || {})) if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
    for (const [name, value] of Object.entries(node.style || {})) if (STYLES.has(name) && !/url|expression/i.test(value)) element.style[name] = value;
    const classes = (node.classes || []).filter((name) => /^tml-[\w-]+$/.test(name));
    if (classes.length) element.setAttribute("class", classes.join(" "));
  }
  for (const child of node.children || []) element.append(build(child, depth + 1));
  return element;
}

// The element of a formula; null if it cannot be parsed, and its text is shown instead.
export function formula(temml, text, display) {
  if (text.length > LONGEST) return null;
  try {
    const settings = { displayMode: display, throwOnError: true, trust: false, strict: false, maxExpand: 200, maxSize: [20, 20] };
    return build(temml.__renderToMathMLTree(text, settings), 0);
  } catch {
    return null;
  }
}
