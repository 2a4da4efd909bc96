/** Elements, and figures for people. */

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: Event) => void)>;

/** An element with its attributes (`onclick` and the like are listeners) and its children. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...given(children));
  return element;
}

const given = (children: Child[]) => children.filter((child): child is Node | string => child != null && child !== false);

/** Replaces an element's children. */
export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren(...given(children));
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in the largest binary unit of which there is one. */
export function bytes(n: number, digits = 2): string {
  const power = n < 1024 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(n) / 10));
  return power ? `${(n / 1024 ** power).toFixed(digits)} ${UNITS[power]}` : `${n} bytes`;
}

export const whole = (n: number): string => n.toLocaleString("en-US", { maximumFractionDigits: 0 });

/** A number with the SI prefix of thousands: 25k, 1.2M. */
export function short(n: number): string {
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const)
    if (n >= unit) return `${Number((n / unit).toPrecision(3))}${name}`;
  return `${Number(n.toPrecision(3))}`;
}

/** Seconds in s, ms or us. */
export function seconds(s: number): string {
  for (const [unit, name] of [[1, "s"], [1e-3, "ms"]] as const) if (s >= unit) return `${(s / unit).toFixed(2)} ${name}`;
  return `${(s * 1e6).toFixed(1)} µs`;
}

/** A button that copies a text, and says so. */
export function copies(label: string, text: () => string): HTMLButtonElement {
  return h("button", { type: "button", onclick: (event) => copy(event.currentTarget as HTMLElement, text()) }, label);
}

export async function copy(button: HTMLElement, text: string): Promise<void> {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy it by hand";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

/** Settles when nothing has moved for a moment, if whoever waits checks that it is still wanted. */
export const pause = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 100));
