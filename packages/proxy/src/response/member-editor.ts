import { JsonValueEnd, type TextEdit } from "@kv/http";
import { EDITED_MEMBERS } from "./answer-members.js";

/**
 * Gives the JSON text that takes the place of a member's value, of which `value` is the JSON text.
 */
export type ValueEdit = (value: string) => string | Promise<string>;

/** Edits by the names of members. `null`: the value becomes `null`, however long it is. */
export type MemberEdits = Readonly<Record<string, ValueEdit | null>>;

/** A member whose value is being read. */
interface OpenMember {
  readonly name: string;
  readonly end: JsonValueEnd;
  /** As much of the value as an edit has to read. */
  value: string;
}

/** The end of a text in which a member may begin. */
const BEGIN_OF_MEMBER = /"\w{0,32}(?:"\s*:?\s*)?$/;

/**
 * Changes the values of members in a JSON text that comes in pieces. The members may be at any
 * depth. Quotes inside of strings are escaped, so no string is taken for a name.
 */
export class MemberEditor {
  readonly #edits: MemberEdits;
  readonly #names: readonly string[];
  readonly #erased = new Set<string>();
  #open: OpenMember | undefined = undefined;

  constructor(edits: MemberEdits) {
    this.#edits = edits;
    this.#names = Object.keys(edits);
  }

  /** Names of the members whose values, other than `null`, became `null`. */
  get erased(): ReadonlySet<string> {
    return this.#erased;
  }

  /** Bytes of a value that has not ended, which an edit waits for. */
  get heldBytes(): number {
    return this.#open?.value.length ?? 0;
  }

  /** Whether a text that begins outside of a member's value has none of them. */
  isPlain(text: string): boolean {
    return this.#open === undefined && !this.#names.some((name) => text.includes(name));
  }

  /** The changes of the next piece, in which each character stands for a byte. */
  async edit(text: string): Promise<TextEdit[]> {
    const edits: TextEdit[] = [];
    let start = 0;
    for (;;) {
      if (this.#open === undefined) {
        EDITED_MEMBERS.lastIndex = start;
        const name = EDITED_MEMBERS.exec(text)?.[1];
        if (name === undefined) return edits;
        start = EDITED_MEMBERS.lastIndex;
        if (!Object.hasOwn(this.#edits, name)) continue;
        this.#open = { name, end: new JsonValueEnd(), value: "" };
        if (this.#edits[name] === null && text[start] !== "n") this.#erased.add(name);
      }
      const { name, end } = this.#open;
      const edit = this.#edits[name];
      const found = end.find(text, start);
      const to = found === -1 ? text.length : found;
      const value = edit == null ? "" : this.#open.value + text.slice(start, to);
      let edited = "";
      if (found === -1) this.#open.value = value;
      else {
        this.#open = undefined;
        edited = edit == null ? "null" : await edit(Buffer.from(value, "latin1").toString());
      }
      edits.push({ start, end: to, text: Buffer.from(edited).toString("latin1") });
      if (found === -1) return edits;
      start = to;
    }
  }

  /**
   * How much of a text can leave before more of it has come: no member begins in its end. `from`:
   * behind its last edit.
   */
  passingLength(text: string, from: number): number {
    const begin = this.#open === undefined ? text.slice(from).search(BEGIN_OF_MEMBER) : -1;
    return begin === -1 ? text.length : from + begin;
  }

  /** The text has ended. Returns the value of a member that never ended, which an edit waits for. */
  end(): string {
    const value = this.#open?.value ?? "";
    this.#open = undefined;
    return value;
  }
}
