/**
 * The values of flags, read as commander's argument parsers. Each throws what `refuseValue` throws
 * for a value that it does not take.
 */

/** Refuses a flag's value: commander prints the message after the flag and the value. */
export function refuseValue(message: string): never {
  // As commander's InvalidArgumentError, by which commander recognises it.
  throw Object.assign(new Error(message), { code: "commander.invalidArgument", exitCode: 1 });
}

/** Reads whole numbers of a range. */
export function wholeNumberFrom(least: number, most: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (/^\d{1,16}$/.test(text) && value >= least && value <= most) return value;
    return refuseValue(`It must be a whole number from ${least} to ${most}.`);
  };
}

/** A whole number. */
export const wholeNumber = wholeNumberFrom(0, 999_999_999_999);
/** A whole number of at least 1, and a time in ms that a timer takes. */
export const count = wholeNumberFrom(1, 2 ** 31 - 1);
/** A TCP port, or 0 for a free one. */
export const port = wholeNumberFrom(0, 65_535);

/** A number of 0 or more. */
export function number(text: string): number {
  const value = Number(text);
  if (text !== "" && value >= 0 && Number.isFinite(value)) return value;
  return refuseValue("It must be a number of 0 or more.");
}

/** A number above 0. */
export function positiveNumber(text: string): number {
  return number(text) || refuseValue("It must be a number above 0.");
}

/** "5%" or "0.05" as 0.05. */
export function share(text: string): number {
  const [, digits = "", percent] = /^(.+?)(%)?$/.exec(text) ?? [];
  const value = Number(digits) / (percent === undefined ? 1 : 100);
  if (digits.trim() !== "" && value >= 0 && value <= 1) return value;
  return refuseValue("It must be a share, such as 5% or 0.05.");
}

const UNITS_MS: Readonly<Record<string, number>> = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 };

/** "90s", "2m" or "500ms" in ms; a bare number is seconds. */
export function duration(text: string): number {
  const [, value, unit = "s"] = /^(\d+(?:\.\d+)?)(ms|s|m|h)?$/.exec(text) ?? [];
  const ms = Number(value) * (UNITS_MS[unit] ?? Number.NaN);
  if (ms > 0 && ms < 2 ** 31) return ms;
  return refuseValue("It must be a time, such as 90s or 2m; a bare number is seconds.");
}

const UNITS_BYTES: Readonly<Record<string, number>> = { "": 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 };

/** "65536", "64KiB" or "1GiB" in bytes. */
export function size(text: string): number {
  const [, digits = "", unit = ""] = /^(\d{1,12})(?:([kmg])(?:i?b)?|b)?$/i.exec(text.trim()) ?? [];
  const bytes = Number(digits) * (UNITS_BYTES[unit.toLowerCase()] ?? Number.NaN);
  if (digits !== "" && Number.isSafeInteger(bytes)) return bytes;
  return refuseValue("It must be bytes, such as 65536, 64KiB or 1GiB.");
}

/** Where something listens. */
export interface HostAndPort {
  /** An address or a name; an IPv6 address without brackets. */
  readonly host: string;
  readonly port: number;
}

/**
 * "host:port", or a port alone of 127.0.0.1; port 0 takes a free one. An IPv6 address is in
 * brackets.
 */
export function listenAddress(text: string): HostAndPort {
  const [, host = "127.0.0.1", digits = ""] = /^(?:(.+):)?(\d+)$/.exec(text) ?? [];
  if (digits === "") refuseValue("It must be a port or host:port, such as 10.0.0.7:18515.");
  return { host: host.replace(/^\[(.*)\]$/, "$1"), port: port(digits) };
}

/** "host:port"; an IPv6 address is in brackets. */
export function hostAndPort(text: string): HostAndPort {
  if (!/^.+:0*[1-9]\d*$/.test(text)) refuseValue("It must be host:port, such as 10.0.0.7:18515.");
  return listenAddress(text);
}

/** The URL of something that speaks HTTP. */
export function httpUrl(text: string): string {
  if (URL.canParse(text) && /^https?:/.test(text)) return text;
  return refuseValue("It must be an http or https URL.");
}

/** Reads one of these words, in lower or upper case. */
export function oneOf<const Word extends string>(
  ...words: readonly Word[]
): (text: string) => Word {
  return (text) =>
    words.find((word) => word.toLowerCase() === text.toLowerCase()) ??
    refuseValue(`It must be one of ${words.join(", ")}.`);
}

/** Reads a list, such as "100,300": its parts as `read` reads them. */
export function listOf<T>(read: (text: string) => T): (text: string) => T[] {
  return (text) =>
    text
      .split(",")
      .map((part) => read(part.trim() || refuseValue("It must be values, separated by commas.")));
}

/** Reads a flag that may be given several times: its values in their order. */
export function each<T>(read: (text: string) => T): (text: string, before?: readonly T[]) => T[] {
  return (text, before = []) => [...before, read(text)];
}
