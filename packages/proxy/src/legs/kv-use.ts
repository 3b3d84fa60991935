/** What a decode leg has shown of the KV that a prefill worker holds for it. */
export class KvUse {
  #state: "unseen" | "unsure" | "taken" = "unseen";

  /** An instance may have the parameters. It frees the blocks itself when its connection ends: a release could free them while it reads. */
  readonly sent = (): void => {
    this.#state = "taken";
  };

  /** An instance has answered, and not with a generation. A status below 500 and 501 come from its HTTP layer, or from a gateway before it. */
  refused(status: number): void {
    this.#state = (status !== 200 && status < 500) || status === 501 ? "unseen" : "unsure";
  }

  /** Whether an instance has taken the KV, or frees the blocks itself. */
  get isTaken(): boolean {
    return this.#state === "taken";
  }

  /** Whether no engine has seen the parameters. */
  get isUnseen(): boolean {
    return this.#state === "unseen";
  }
}
