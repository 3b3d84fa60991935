/** A prompt that clients asked for. */
export interface AskedPrompt {
  readonly model: unknown;
  readonly tokens: Int32Array;
  readonly uses: number;
}

const MAX_PROMPTS = 128;
const MAX_TOKENS = 2 ** 20;

/** The prompts that are asked for most. One that continues another, as a further turn does, takes its place. */
export class AskedPrompts {
  /** The last one that was asked for is at the end. */
  readonly #prompts = new Set<AskedPrompt>();
  #tokens = 0;

  add(model: unknown, ids: ArrayLike<number>): void {
    const tokens = Int32Array.from(ids);
    let uses = 1;
    for (const prompt of this.#prompts) {
      if (prompt.model !== model || !continues(tokens, prompt.tokens)) continue;
      uses += prompt.uses;
      this.#remove(prompt);
    }
    this.#prompts.add({ model, tokens, uses });
    this.#tokens += tokens.length;
    while (this.#prompts.size > MAX_PROMPTS || this.#tokens > MAX_TOKENS) {
      const [least] = this.mostAsked().slice(-1);
      if (least === undefined) return;
      this.#remove(least);
    }
  }

  /** Among equals the last one first. */
  mostAsked(): readonly AskedPrompt[] {
    return [...this.#prompts].reverse().sort((one, other) => other.uses - one.uses);
  }

  #remove(prompt: AskedPrompt): void {
    this.#prompts.delete(prompt);
    this.#tokens -= prompt.tokens.length;
  }
}

function continues(tokens: Int32Array, before: Int32Array): boolean {
  if (before.length > tokens.length) return false;
  // Prompts mostly begin alike, and differ at the end.
  for (let at = before.length - 1; at >= 0; at -= 1) if (tokens[at] !== before[at]) return false;
  return true;
}
