/** Control characters but line break and tab, and those that change the direction of text. */
const OBEYED = /[^\n\t\P{Cc}]|\p{Bidi_Control}/gu;

/** Escapes what a terminal obeys, such as `\u001b`, as JSON does. */
export function printable(text: string): string {
  return text.replace(
    OBEYED,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Undefined in a bundle in CommonJS. */
const here: string | undefined = import.meta.url;
const IN_CHECKOUT = here !== undefined && !here.includes("/node_modules/");

/** `npx` needs installed packages; a checkout has npm scripts. */
export function withCommands(text: string, inCheckout = IN_CHECKOUT): string {
  return inCheckout ? text.replace(/\bnpx --no-install (kv-[a-z]+)/g, "npm run $1 --") : text;
}

/** Undefined where stdout is no terminal. */
export const terminalColumns = (): number | undefined => process.stdout.columns;

/** Writes to stdout, through `printable` and `withCommands`. */
export function print(text: string): void {
  process.stdout.write(printable(withCommands(text)));
}

/** Writes to stderr, through `printable` and `withCommands`. */
export function printError(text: string): void {
  process.stderr.write(printable(withCommands(text)));
}

/** Writes a report for programs to stdout. */
export function printJson(value: unknown): void {
  print(`${JSON.stringify(value, null, 2)}\n`);
}
