/** A member of a JSON object, by its positions in the object's text. */
export interface JsonMember {
  readonly key: string;
  /** Position of the key's opening quote. */
  readonly start: number;
  readonly valueStart: number;
  /** Position after the value. */
  readonly end: number;
}

/**
 * The members of the object in `text`, in order, duplicates included. `text` must be an object that
 * `JSON.parse` accepts.
 */
export function topLevelMembers(text: string): JsonMember[] {
  const members: JsonMember[] = [];
  let at = skipBlank(text, text.indexOf("{") + 1);
  while (text[at] === '"') {
    const start = at;
    const keyEnd = endOfString(text, at);
    const valueStart = skipBlank(text, skipBlank(text, keyEnd) + 1);
    const end = endOfValue(text, valueStart);
    members.push({ key: keyOf(text, start, keyEnd), start, valueStart, end });
    at = skipBlank(text, end);
    if (text[at] === ",") at = skipBlank(text, at + 1);
  }
  return members;
}

/**
 * The text of a member's value; undefined where there is none. Of duplicate keys the last counts,
 * as in `JSON.parse`.
 */
export function rawMember(text: string, key: string): string | undefined {
  const member = topLevelMembers(text).findLast((candidate) => candidate.key === key);
  return member === undefined ? undefined : text.slice(member.valueStart, member.end);
}

/** Changes of an object's members. */
export interface MemberEdits {
  readonly remove?: readonly string[] | undefined;
  /** Values as JSON text. They follow the members that stay. */
  readonly set?: Readonly<Record<string, string>> | undefined;
}

/**
 * Edits the top-level members of a JSON object as text. All other members stay as they were
 * written: integers beyond 2^53 keep their digits, which a parse and a new serialisation would
 * lose.
 */
export function editMembers(text: string, { remove = [], set = {} }: MemberEdits): string {
  let members = "";
  for (const { key, start, end } of topLevelMembers(text)) {
    if (remove.includes(key) || Object.hasOwn(set, key)) continue;
    members += `${members === "" ? "" : ","}${text.slice(start, end)}`;
  }
  for (const key in set)
    members += `${members === "" ? "" : ","}${JSON.stringify(key)}:${set[key]}`;
  return `{${members}}`;
}

const QUOTE = 0x22;
const BACKSLASH = 0x5c;

function skipBlank(text: string, from: number): number {
  let at = from;
  for (;;) {
    const code = text.charCodeAt(at);
    if (code !== 0x20 && code !== 0x0a && code !== 0x0d && code !== 0x09) return at;
    at++;
  }
}

/** Keys are hardly ever written with escapes, and a slice costs less than a parse. */
function keyOf(text: string, start: number, end: number): string {
  const key = text.slice(start + 1, end - 1);
  return key.includes("\\") ? (JSON.parse(text.slice(start, end)) as string) : key;
}

/**
 * The position after the closing quote. `indexOf` is fast on long strings, such as images in
 * base64.
 */
function endOfString(text: string, quote: number): number {
  let close = text.indexOf('"', quote + 1);
  while (close !== -1) {
    let slashes = 0;
    while (text.charCodeAt(close - 1 - slashes) === BACKSLASH) slashes++;
    if (slashes % 2 === 0) return close + 1;
    close = text.indexOf('"', close + 1);
  }
  return text.length;
}

function endOfValue(text: string, from: number): number {
  let depth = 0;
  let at = from;
  while (at < text.length) {
    const code = text.charCodeAt(at);
    if (code === QUOTE) {
      at = endOfString(text, at);
      if (depth === 0) return at;
      continue;
    }
    if (code === 0x7b || code === 0x5b) depth++;
    else if (code === 0x7d || code === 0x5d) {
      if (depth === 0) return at;
      depth--;
      if (depth === 0) return at + 1;
    } else if (depth === 0 && (code === 0x2c || code <= 0x20)) return at;
    at++;
    if (depth > 0 && at - from > STEPPED_CHARACTERS) at = nextInside(text, at);
  }
  return at;
}

/**
 * Longer lists and objects are searched: of a list of millions of token ids, that takes a fifth of
 * the time.
 */
const STEPPED_CHARACTERS = 1000;
const INSIDE = /["[\]{}]/g;

/** The position of the next string, list or object, or of the end of one. */
function nextInside(text: string, from: number): number {
  INSIDE.lastIndex = from;
  return INSIDE.test(text) ? INSIDE.lastIndex - 1 : text.length;
}
