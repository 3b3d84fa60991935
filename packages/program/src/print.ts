/**
 * What a terminal obeys instead of showing it: control characters but line break and tab, and
 * characters that change the direction of text.
 */
const OBEYED = /[^\n\t\P{Cc}]|\p{Bidi_Control}/gu;

/**
 * The text with each character that a terminal obeys as its escape, such as `\u001b`. JSON keeps
 * its meaning: `JSON.stringify` leaves DEL, C1 and the direction marks in strings, and there the
 * escape is the same character.
 */
export function printable(text: string): string {
  return text.replace(
    OBEYED,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Undefined in a bundle in CommonJS. */
const here: string | undefined = import.meta.url;
const IN_CHECKOUT = here !== undefined && !here.includes("/node_modules/");

/**
 * A text with the commands that start these programs here: `npx` finds them only where the packages
 * are installed, a checkout has npm scripts.
 */
export function withCommands(text: string, inCheckout = IN_CHECKOUT): string {
  return inCheckout ? text.replace(/\bnpx --no-install (kv-[a-z]+)/g, "npm run $1 --") : text;
}

/** Writes a result to stdout, as `printable` and `withCommands` give it. */
export function print(text: string): void {
  process.stdout.write(printable(withCommands(text)));
}

/** Writes progress, a log line or an error to stderr, as `printable` and `withCommands` give it. */
export function printError(text: string): void {
  process.stderr.write(printable(withCommands(text)));
}

/** Writes a report for programs to stdout. */
export function printJson(value: unknown): void {
  print(`${JSON.stringify(value, null, 2)}\n`);
}
