/**
 * The script of the page, as text. It runs in a browser, without dependencies. All values enter the page as text, never as markup, since names in a report may
 * come from a peer.
 */
export const PAGE_SCRIPT = `
"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
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
  return table;
};
const stages = (report.stages || []).length;
const nameOf = ({ prefillStage, prefillRank }) => (stages > 1 ? "pp" + prefillStage + "tp" + prefillRank : "P" + prefillRank);
const isSame = (one, other) => one.prefillRank === other.prefillRank && one.prefillStage === other.prefillStage;
const colour = (rank) => {
  const place = report.notifications.findIndex((one) => isSame(one, rank));
  return "hsl(" + Math.round((place * 137.508) % 360) + " 60% 45%)";
};
const latent = !report.groups.some((kind) => kind === "full" || kind === "swa");
const heads = ([begin, end]) => (latent ? "latent" : end - begin === 1 ? String(begin) : begin + "-" + (end - 1));
const panel = (id) => {
  const element = document.getElementById(id);
  element.replaceChildren();
  return element;
};
const choose = (button) => {
  for (const other of button.parentElement.querySelectorAll("button")) other.removeAttribute("aria-pressed");
  button.setAttribute("aria-pressed", "true");
};

function showDecodeRank(number) {
  const rank = report.ranks.find((one) => one.decodeRank === number);
  const detail = panel("detail");
  detail.append(make("h2", {}, "Decode rank " + number + ", heads " + heads(rank.heads)));
  detail.append(rows(
    ["reads", "heads", "regions", "bytes", "descriptors", "merged"],
    rank.reads.map((read) => [nameOf(read), heads(read.heads), read.layers, read.lengthBytes, read.descriptors, read.merged]),
  ));
  if (rank.notifyOnly.length > 0)
    detail.append(make("p", {}, "Only notifies " + rank.notifyOnly.map(nameOf).join(", ") + "."));
  detail.append(make("h3", {}, "Blocks of the request"));
  const blocks = make("div", { id: "blocks", class: "choices" });
  for (const block of report.blocks.filter((one) => one.decodeRank === number)) {
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
  table.id = "pieces";
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
    .map((read) => ["D" + rank.decodeRank, heads(read.heads), read.lengthBytes]));
  detail.append(rows(["read by", "heads", "bytes"], readers));
  if (stages === 1) return;
  const { regions } = report.stages.find(({ stage }) => stage === notice.prefillStage);
  detail.append(make("h3", {}, "Caches of its stage"), make("p", { id: "caches" }, regions.join(", ")));
}

const ranks = document.getElementById("ranks");
for (const notice of report.notifications || []) {
  const { prefillRank, prefillStage } = notice;
  const place = { "data-prefill-rank": prefillRank, "data-prefill-stage": prefillStage, type: "button" };
  const button = make("button", place, nameOf(notice));
  button.style.borderColor = colour(notice);
  button.addEventListener("click", () => { choose(button); showPrefillRank(notice); });
  ranks.append(button);
}
for (const { decodeRank } of report.ranks || []) {
  const button = make("button", { "data-decode-rank": decodeRank, type: "button" }, "D" + decodeRank);
  button.addEventListener("click", () => { choose(button); showDecodeRank(decodeRank); });
  ranks.append(button);
}
document.body.dataset.ready = "true";
`;
