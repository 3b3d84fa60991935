import { holdsLatents, showBytes, showHeads, showPrefillRank } from "../src/render/format.js";
import type { BlockReport, PairReport, PlanReport, PrefillRank } from "../src/report/report.js";

/**
 * Buttons on the page of `reportBody` show a rank's reads and a block's sources. Values enter as
 * text, never as markup, because names may come from a peer.
 */
export function explore(report: PairReport): void {
  if (report.outcome === "planned") new Explorer(report).addRanks();
  document.body.dataset["ready"] = "true";
}

type Side = "prefill" | "decode";

class Explorer {
  readonly #report: PlanReport;
  readonly #stages: number;
  readonly #isLatent: boolean;

  constructor(report: PlanReport) {
    this.#report = report;
    this.#stages = report.stages.length;
    this.#isLatent = holdsLatents(report.groups);
  }

  addRanks(): void {
    for (const notice of this.#report.notifications) {
      const place = {
        "data-prefill-rank": notice.prefillRank,
        "data-prefill-stage": notice.prefillStage,
      };
      const button = this.#addRank(place, this.#nameOf(notice), "prefill", () =>
        this.#showPrefillRank(notice),
      );
      button.style.borderColor = this.#colour(notice);
    }
    for (const rank of this.#report.ranks) {
      const place = { "data-decode-rank": rank.decodeRank };
      this.#addRank(place, `D${rank.decodeRank}`, "decode", () => this.#showDecodeRank(rank));
    }
  }

  /** The rank's box in the picture acts like the button. A second press undoes the first. */
  #addRank(place: Attributes, name: string, side: Side, show: () => void): HTMLElement {
    const button = make("button", { type: "button", "aria-pressed": "false", ...place }, name);
    const act = () => {
      const wasPressed = button.getAttribute("aria-pressed") === "true";
      panel("detail");
      press(button, !wasPressed);
      highlight(side, wasPressed ? undefined : name);
      if (!wasPressed) show();
    };
    button.addEventListener("click", act);
    for (const box of all(`.kv-plan .rank[data-${side}="${name}"]`)) {
      box.style.cursor = "pointer";
      box.addEventListener("click", act);
    }
    document.getElementById("ranks")?.append(button);
    return button;
  }

  #showDecodeRank(rank: PlanReport["ranks"][number]): void {
    const { blocks, blocksLeftOut, groups, ranks } = this.#report;
    const detail = panel("detail");
    detail.append(
      make("h2", {}, `Decode rank ${rank.decodeRank}, heads ${this.#heads(rank.heads)}`),
      table(
        ["reads", "heads", "regions", "bytes", "descriptors", "merged"],
        rank.reads.map((read) => [
          this.#nameOf(read),
          this.#heads(read.heads),
          read.layers,
          showBytes(read.lengthBytes),
          read.descriptors,
          read.merged,
        ]),
      ),
    );
    if (rank.notifyOnly.length > 0) {
      const names = rank.notifyOnly.map((one) => this.#nameOf(one));
      detail.append(make("p", {}, `Only notifies ${names.join(", ")}.`));
    }
    detail.append(make("h3", {}, "Blocks of the request"));
    const listed = blocks.filter((one) => one.decodeRank === rank.decodeRank);
    if (blocksLeftOut > 0) {
      const more = Math.round(blocksLeftOut / ranks.length);
      const text = `The first ${listed.length} blocks are listed; ${more} more of this rank are not.`;
      detail.append(make("p", { id: "left-out" }, text));
    }
    const choices = make("div", { id: "blocks", class: "choices" });
    for (const block of listed) {
      const stage = this.#stages > 1 ? `stage ${block.stage}, ` : "";
      const group = groups.length > 1 ? `group ${block.group}: ` : "";
      const place = {
        "data-block": block.block,
        "data-group": block.group,
        "data-stage": block.stage,
      };
      const button = make(
        "button",
        { ...place, type: "button" },
        `${stage}${group}block ${block.block}`,
      );
      button.addEventListener("click", () => {
        press(button, true);
        this.#showBlock(block);
      });
      choices.append(button);
    }
    detail.append(choices, make("div", { id: "block" }));
  }

  #showBlock(block: BlockReport): void {
    const bar = make("div", { class: "bar" });
    for (const piece of block.pieces) {
      const title = `${this.#nameOf(piece)} block ${piece.remoteBlock}`;
      const part = make("div", { class: "piece", title });
      part.style.left = `${(100 * piece.offset) / block.lengthBytes}%`;
      part.style.width = `${(100 * piece.lengthBytes) / block.lengthBytes}%`;
      part.style.background = this.#colour(piece);
      bar.append(part);
    }
    const pieces = table(
      ["bytes of this block", "from", "its block", "its bytes"],
      block.pieces.map((piece) => [
        `${piece.offset} to ${piece.offset + piece.lengthBytes}`,
        this.#nameOf(piece),
        piece.remoteBlock,
        `${piece.remoteOffset} to ${piece.remoteOffset + piece.lengthBytes}`,
      ]),
      "pieces",
    );
    const notes = [
      block.pieces.length === 0 ? "No transfer reaches this block." : undefined,
      block.permuted ? "The receive pass then puts its heads and tokens in order." : undefined,
      block.zeroFrom === null
        ? undefined
        : `The receive pass zeroes it from its token ${block.zeroFrom} on.`,
    ];
    panel("block").append(
      make("h3", {}, `Block ${block.block}, tokens from ${block.firstToken}`),
      bar,
      pieces,
      ...notes.flatMap((note) => (note === undefined ? [] : [make("p", {}, note)])),
    );
  }

  #showPrefillRank(notice: PlanReport["notifications"][number]): void {
    const { ranks, stages } = this.#report;
    const name = `Prefill rank ${notice.prefillRank}${this.#stages > 1 ? ` of stage ${notice.prefillStage}` : ""}`;
    const from = notice.from.map((rank) => `D${rank}`).join(", ") || "no rank";
    const readers = ranks.flatMap((rank) =>
      rank.reads
        .filter((read) => this.#nameOf(read) === this.#nameOf(notice))
        .map((read) => [
          `D${rank.decodeRank}`,
          this.#heads(read.heads),
          showBytes(read.lengthBytes),
        ]),
    );
    const detail = panel("detail");
    detail.append(
      make("h2", {}, name),
      make("p", {}, `Awaits ${notice.awaits} notifications, from ${from}.`),
      table(["read by", "heads", "bytes"], readers),
    );
    if (this.#stages === 1) return;
    const caches =
      stages.find(({ stage }) => stage === notice.prefillStage)?.regions.join(", ") ?? "";
    detail.append(make("h3", {}, "Caches of its stage"), make("p", { id: "caches" }, caches));
  }

  #nameOf(rank: PrefillRank): string {
    return showPrefillRank(rank, this.#stages);
  }

  #heads(range: readonly [number, number]): string {
    return this.#isLatent ? "latent" : showHeads(range);
  }

  #colour(rank: PrefillRank): string {
    const edge = document.querySelector(
      `.kv-plan .rank[data-prefill="${this.#nameOf(rank)}"] rect`,
    );
    return edge === null ? "gray" : getComputedStyle(edge).stroke;
  }
}

/** Without a name, highlights everything. */
function highlight(side: Side, name: string | undefined): void {
  for (const one of all(".kv-plan .on")) one.classList.remove("on");
  for (const picture of all(".kv-plan")) picture.classList.toggle("chosen", name !== undefined);
  if (name === undefined) return;
  const mark = (selector: string) => {
    for (const one of all(selector)) one.classList.add("on");
  };
  for (const edge of all(`.kv-plan .edge[data-${side}="${name}"]`)) {
    edge.classList.add("on");
    for (const end of ["prefill", "decode"])
      mark(`.kv-plan .rank[data-${end}="${edge.dataset[end]}"]`);
  }
  mark(`.kv-plan .rank[data-${side}="${name}"]`);
}

function press(button: HTMLElement, isPressed: boolean): void {
  for (const other of button.parentElement?.querySelectorAll("button") ?? [])
    other.setAttribute("aria-pressed", String(other === button && isPressed));
}

function all(selector: string): Iterable<HTMLElement | SVGElement> {
  return document.querySelectorAll<HTMLElement | SVGElement>(selector);
}

function panel(id: string): Element {
  const element = document.getElementById(id) ?? document.body;
  element.replaceChildren();
  return element;
}

type Attributes = Readonly<Record<string, string | number>>;

function make(
  tag: string,
  attributes: Attributes,
  ...children: (string | number | Node)[]
): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function table(
  head: readonly string[],
  rows: readonly (readonly (string | number)[])[],
  id = "",
): HTMLElement {
  const row = (cells: readonly (string | number)[], tag: string) =>
    make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  const lines = [row(head, "th"), ...rows.map((cells) => row(cells, "td"))];
  return make("div", { class: "scroll" }, make("table", id === "" ? {} : { id }, ...lines));
}
