/**
 * The script of a page with a report, as text: `explore(report)` fills what `reportBody` has left empty. It runs in a browser, without dependencies. All values
 * enter the page as text, never as markup, since names in a report may come from a peer.
 */
export const EXPLORE_SCRIPT = `
"use strict";
function explore(report) {
const shown = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit++; }
  return Number(bytes.toPrecision(3)) + " " + units[unit];
};
const make = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.map(String));
  return element;
};
const rows = (head, lines) => {
  const table = document.createElement("table");
  const line = (cells, tag) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.append(cell instanceof Node ? cell : make(tag, {}, cell));
    return row;
  };
  table.append(line(head, "th"), ...lines.map((cells) => line(cells, "td")));
  const around = document.createElement("div");
  around.className = "scroll";
  around.append(table);
  return around;
};
const stages = (report.stages || []).length;
const nameOf = ({ prefillStage, prefillRank }) => (stages > 1 ? "pp" + prefillStage + "tp" + prefillRank : "P" + prefillRank);
const isSame = (one, other) => one.prefillRank === other.prefillRank && one.prefillStage === other.prefillStage;
const colour = (rank) => {
  const edge = document.querySelector('.kv-plan .rank[data-prefill="' + nameOf(rank) + '"] rect');
  return edge === null ? "gray" : getComputedStyle(edge).stroke;
};
const latent = !(report.groups || []).some((kind) => kind === "full" || kind === "swa");
const heads = ([begin, end]) => (latent ? "latent" : end - begin === 1 ? String(begin) : begin + "-" + (end - 1));
const panel = (id) => {
  const element = document.getElementById(id);
  element.replaceChildren();
  return element;
};
const choose = (button) => {
  for (const other of button.parentElement.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
};
/** Highlights the curves of a rank and the ranks at their other ends; none: all. */
const highlight = (side, name) => {
  for (const picture of document.querySelectorAll(".kv-plan")) {
    picture.classList.toggle("chosen", name !== undefined);
    for (const one of picture.querySelectorAll(".on")) one.classList.remove("on");
    if (name === undefined) continue;
    for (const edge of picture.querySelectorAll('.edge[data-' + side + '="' + name + '"]')) {
      edge.classList.add("on");
      for (const end of ["prefill", "decode"])
        picture.querySelector('.rank[data-' + end + '="' + edge.dataset[end] + '"]')?.classList.add("on");
    }
    picture.querySelector('.rank[data-' + side + '="' + name + '"]')?.classList.add("on");
  }
};

function showDecodeRank(number) {
  const rank = report.ranks.find((one) => one.decodeRank === number);
  const detail = panel("detail");
  detail.append(make("h2", {}, "Decode rank " + number + ", heads " + heads(rank.heads)));
  detail.append(rows(
    ["reads", "heads", "regions", "bytes", "descriptors", "merged"],
    rank.reads.map((read) => [nameOf(read), heads(read.heads), read.layers, shown(read.lengthBytes), read.descriptors, read.merged]),
  ));
  if (rank.notifyOnly.length > 0)
    detail.append(make("p", {}, "Only notifies " + rank.notifyOnly.map(nameOf).join(", ") + "."));
  detail.append(make("h3", {}, "Blocks of the request"));
  const blocks = make("div", { id: "blocks", class: "choices" });
  const listed = report.blocks.filter((one) => one.decodeRank === number);
  if (report.blocksLeftOut > 0)
    detail.append(make("p", { id: "left-out" }, "The first " + listed.length + " blocks are listed; " +
      Math.round(report.blocksLeftOut / report.ranks.length) + " more of this rank are not."));
  for (const block of listed) {
    const name = (stages > 1 ? "stage " + block.stage + ", " : "") +
      (report.groups.length > 1 ? "group " + block.group + ": " : "") + "block " + block.block;
    const place = { "data-block": block.block, "data-group": block.group, "data-stage": block.stage, type: "button" };
    const button = make("button", place, name);
    button.addEventListener("click", () => { choose(button); showBlock(block); });
    blocks.append(button);
  }
  detail.append(blocks, make("div", { id: "block" }));
}

function showBlock(block) {
  const detail = panel("block");
  detail.append(make("h3", {}, "Block " + block.block + ", tokens from " + block.firstToken));
  const bar = make("div", { class: "bar" });
  for (const piece of block.pieces) {
    const part = make("div", { class: "piece", title: nameOf(piece) + " block " + piece.remoteBlock });
    part.style.left = (100 * piece.offset) / block.lengthBytes + "%";
    part.style.width = (100 * piece.lengthBytes) / block.lengthBytes + "%";
    part.style.background = colour(piece);
    bar.append(part);
  }
  detail.append(bar);
  const table = rows(
    ["bytes of this block", "from", "its block", "its bytes"],
    block.pieces.map((piece) => [
      piece.offset + " to " + (piece.offset + piece.lengthBytes),
      nameOf(piece),
      piece.remoteBlock,
      piece.remoteOffset + " to " + (piece.remoteOffset + piece.lengthBytes),
    ]),
  );
  table.firstChild.id = "pieces";
  detail.append(table);
  if (block.pieces.length === 0) detail.append(make("p", {}, "No transfer reaches this block."));
  if (block.permuted) detail.append(make("p", {}, "The receive pass then puts its heads and tokens in order."));
  if (block.zeroFrom !== null) detail.append(make("p", {}, "The receive pass zeroes it from its token " + block.zeroFrom + " on."));
}

function showPrefillRank(notice) {
  const detail = panel("detail");
  detail.append(make("h2", {}, "Prefill rank " + notice.prefillRank + (stages > 1 ? " of stage " + notice.prefillStage : "")));
  detail.append(make("p", {}, "Awaits " + notice.awaits + " notifications, from " +
    (notice.from.map((one) => "D" + one).join(", ") || "no rank") + "."));
  const readers = report.ranks.flatMap((rank) => rank.reads
    .filter((read) => isSame(read, notice))
    .map((read) => ["D" + rank.decodeRank, heads(read.heads), shown(read.lengthBytes)]));
  detail.append(rows(["read by", "heads", "bytes"], readers));
  if (stages === 1) return;
  const { regions } = report.stages.find(({ stage }) => stage === notice.prefillStage);
  detail.append(make("h3", {}, "Caches of its stage"), make("p", { id: "caches" }, regions.join(", ")));
}

const ranks = document.getElementById("ranks");
const pick = (attributes, name, side, show) => {
  const button = make("button", { type: "button", "aria-pressed": "false", ...attributes }, name);
  const act = () => {
    if (button.getAttribute("aria-pressed") === "true") {
      button.setAttribute("aria-pressed", "false");
      panel("detail");
      highlight();
      return;
    }
    choose(button);
    highlight(side, name);
    show();
  };
  button.addEventListener("click", act);
  for (const box of document.querySelectorAll('.kv-plan .rank[data-' + side + '="' + name + '"]')) {
    box.style.cursor = "pointer";
    box.addEventListener("click", act);
  }
  ranks.append(button);
  return button;
};
if (report.outcome === "planned") {
  for (const notice of report.notifications) {
    const place = { "data-prefill-rank": notice.prefillRank, "data-prefill-stage": notice.prefillStage };
    pick(place, nameOf(notice), "prefill", () => showPrefillRank(notice)).style.borderColor = colour(notice);
  }
  for (const { decodeRank } of report.ranks)
    pick({ "data-decode-rank": decodeRank }, "D" + decodeRank, "decode", () => showDecodeRank(decodeRank));
}
document.body.dataset.ready = "true";
}
`;
