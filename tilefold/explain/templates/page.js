// Pointing at a name marks it in every column of the same kernel; columns scroll together.
document.querySelectorAll(".tilefold .codes").forEach((codes) => {
  const mark = (name, on) =>
    codes.querySelectorAll(`i[data-n="${CSS.escape(name)}"]`).forEach((i) => i.classList.toggle("hot", on));
  for (const [event, on] of [["mouseover", true], ["mouseout", false]])
    codes.addEventListener(event, (e) => {
      const i = e.target.closest("i[data-n]");
      if (i) mark(i.dataset.n, on);
    });
  const columns = [...codes.querySelectorAll("pre")];
  let leader = null;
  columns.forEach((pre) => {
    pre.addEventListener("pointerenter", () => (leader = pre));
    pre.addEventListener("scroll", () => {
      if (pre !== leader) return;
      const share = pre.scrollTop / Math.max(1, pre.scrollHeight - pre.clientHeight);
      for (const other of columns)
        if (other !== pre) other.scrollTop = share * (other.scrollHeight - other.clientHeight);
    });
  });
});
