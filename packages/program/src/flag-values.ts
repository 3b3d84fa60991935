/** Commander prints the message after the flag and the value. */
export function refuseValue(message: string): never {
  // Commander knows its InvalidArgumentError by the code.
  throw Object.assign(new Error(message), { code: "commander.invalidArgument", exitCode: 1 });
}

/** A parser of whole numbers in a range. */
export function wholeNumberFrom(least: number, most: number): (text: string) => number {
  return (text) => {
    const value = Number(text);
    if (/^\d{1,16}$/.test(text) && value >= least && value <= most) return value;
    return refuseValue(`It must be a whole number from ${least} to ${most}.`);
  };
}

/** A whole number. */
export const wholeNumber = wholeNumberFrom(0, 999_999_999_999);
/** At least 1, and at most what a timer takes in ms. */
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
  /** IPv6 without brackets. */
  readonly host: string;
  readonly port: number;
}

/** "host:port", or a port of 127.0.0.1. IPv6 is in brackets. */
export function listenAddress(text: string): HostAndPort {
  const [, host = "127.0.0.1", digits = ""] = /^(?:(.+):)?(\d+)$/.exec(text) ?? [];
  if (digits === "") refuseValue("It must be a port or host:port, such as 10.0.0.7:18515.");
  return { host: host.replace(/^\[(.*)\]$/, "$1"), port: port(digits) };
}

/** "host:port"; IPv6 is in brackets. */
export function hostAndPort(text: string): HostAndPort {
  if (!/^.+:0*[1-9]\d*$/.test(text)) refuseValue("It must be host:port, such as 10.0.0.7:18515.");
  return listenAddress(text);
}

/** The URL of an HTTP server. */
export function httpUrl(text: string): string {
  if (URL.canParse(text) && /^https?:/.test(text)) return text;
  return refuseValue("It must be an http or https URL.");
}

/** One of these words, in lower or upper case. */
export function oneOf<const Word extends string>(
  ...words: readonly Word[]
): (text: string) => Word {
  return (text) =>
    words.find((word) => word.toLowerCase() === text.toLowerCase()) ??
    refuseValue(`It must be one of ${words.join(", ")}.`);
}

/** A list such as "100,300", whose parts `read` reads. */
export function listOf<T>(read: (text: string) => T): (text: string) => T[] {
  return (text) =>
    text
      .split(",")
      .map((part) => read(part.trim() || refuseValue("It must be values, separated by commas.")));
}

/** A flag given several times; the values keep their order. */
export function each<T>(read: (text: string) => T): (text: string, before?: readonly T[]) => T[] {
  return (text, before = []) => [...before, read(text)];
}
