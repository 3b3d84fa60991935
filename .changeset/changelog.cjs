// The lines of the packages' CHANGELOGs, for `changeset version`.
const UNRELEASED = "0.0.0";

const indented = (text) => text.trim().split("\n").join("\n  ");

module.exports = {
  getReleaseLine: async ({ summary }) => `- ${indented(summary)}`,
  // A first release has no users to whom an updated dependency is news.
  getDependencyReleaseLine: async (_changesets, dependencies) => {
    const updated = dependencies.filter(({ oldVersion }) => oldVersion !== UNRELEASED);
    if (updated.length === 0) return "";
    return `- Updated: ${updated.map(({ name, newVersion }) => `${name} ${newVersion}`).join(", ")}`;
  },
};
