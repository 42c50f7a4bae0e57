// Which runs a list shows, and in what order. Pure.

/**
 * Runs whose name, model or folder has every word of `filter`, in the order of `by`. Names go from a to z, numbers from the highest,
 * unknown values last. The live run comes first, always.
 */
export function order(runs, filter, by) {
  const asked = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => {
    const text = `${run.name} ${run.model ?? ""} ${run.folder ?? ""} ${run.state}`.toLowerCase();
    return asked.every((word) => text.includes(word));
  });
  const value = (run) => run[by] ?? null;
  const compare = (a, b) => {
    if (a.live !== b.live) {
      return a.live ? -1 : 1;
    }
    if (by === "name") {
      return a.name.localeCompare(b.name, "en", { numeric: true });
    }
    if (value(a) === null || value(b) === null) {
      return (value(a) === null ? 1 : 0) - (value(b) === null ? 1 : 0);
    }
    return value(b) - value(a);
  };
  return [...found].sort(compare);
}
