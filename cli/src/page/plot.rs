//! `wccl bench --plot`: a page that shows bus bandwidth against message size, beside the machine's limit and other libraries.
//!
//! The page is one file that needs no network: SVG that is drawn here, a style for light and dark, and a few lines of script
//! that only show values under the pointer; without it everything is still there, in titles and in a table below. Other
//! results come from files whose texts are foreign: all of it is escaped, none of it reaches the script.
//!
//! One panel a collective if there is something to compare it with, else one panel for all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hw_bridge::call::Op;
use serde::Deserialize;

use crate::rank::collective;
use crate::size;

/// Bytes a file of results may have.
const MAX_RESULTS_BYTES: u64 = 64 << 20;
/// Lines in one panel; more could not be told apart.
const MAX_SERIES: usize = 24;
/// Characters of a name that are shown.
const MAX_NAME: usize = 40;

/// What a line stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LineKind {
    /// What was measured now.
    Own,
    /// What the machine can do.
    Limit,
    /// What others reach.
    Other,
}

/// One line: message sizes in bytes, bus bandwidths in GB/s (10^9 bytes a second), by size.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// What it stands for.
    pub kind: LineKind,
    /// (bytes, GB/s).
    pub points: Vec<(u64, f64)>,
}

/// One chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Its heading.
    pub title: String,
    /// Its lines.
    pub series: Vec<Series>,
}

/// Results of others for the ranks of this run: collective, name, kind, best bandwidth at each size.
#[derive(Debug, Default)]
pub struct Others(BTreeMap<(u8, LineKind, String), BTreeMap<u64, f64>>);

/// A line of a comparison, or a physical limit.
#[derive(Debug, Deserialize)]
struct Line {
    peer: Option<String>,
    limit: Option<String>,
    coll: Option<String>,
    ranks: Option<u64>,
    threads: Option<u64>,
    bytes: Option<u64>,
    #[serde(rename = "busbw_GBs")]
    busbw: Option<f64>,
    lat_us: Option<f64>,
}

/// A file of `wccl bench --report-to-json-file`.
#[derive(Debug, Deserialize)]
struct Report {
    ranks: u64,
    buffers: String,
    results: Vec<ReportRow>,
}

#[derive(Debug, Deserialize)]
struct ReportRow {
    collective: String,
    bytes: u64,
    busbw_gbps: f64,
}

/// Either form of a whole document.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Document {
    Comparison { rows: Vec<Line> },
    Report(Report),
}

impl Others {
    /// Reads files of results and keeps what belongs to `ranks`: a comparison as one document with `rows`, the same rows one a
    /// line, or a report of this program.
    ///
    /// # Errors
    /// A file that cannot be read, is none of these, or holds nothing for these ranks.
    pub fn read(files: &[PathBuf], ranks: usize) -> anyhow::Result<Others> {
        let mut all = Others::default();
        for path in files {
            let name = path.display();
            let bytes = std::fs::metadata(path).with_context(|| format!("reading {name}"))?.len();
            if bytes > MAX_RESULTS_BYTES {
                bail!("{name} has {bytes} bytes; results have at most {MAX_RESULTS_BYTES}");
            }
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {name}"))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let (drawn, held) = all.add(&text, &stem, ranks).with_context(|| format!("{name} cannot be used"))?;
            let list = || held.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            match drawn {
                0 if held.is_empty() => bail!("{name} holds no results"),
                0 if held.contains(&(ranks as u64)) => {
                    bail!("{name} holds no result for {ranks} ranks with a collective, a size and a bandwidth to draw")
                }
                0 => bail!("{name} holds no results for {ranks} ranks; it has some for {}: choose by -r", list()),
                _ => {}
            }
        }
        Ok(all)
    }

    /// Adds the results in one file's text; answers how many, and the numbers of ranks that the file has results for. `stem`
    /// names a report.
    ///
    /// # Errors
    /// The text is in none of the forms.
    pub fn add(&mut self, text: &str, stem: &str, ranks: usize) -> anyhow::Result<(usize, BTreeSet<u64>)> {
        let rows = match serde_json::from_str::<Document>(text) {
            Ok(Document::Comparison { rows }) => rows,
            Ok(Document::Report(r)) => {
                let wanted = r.ranks == ranks as u64;
                let name = format!("{stem} ({})", r.buffers);
                let drawn = r.results.iter().filter(|row| wanted && self.report_row(row, &name)).count();
                return Ok((drawn, r.results.iter().map(|_| r.ranks).collect()));
            }
            Err(_) => {
                let mut rows = Vec::new();
                for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
                    rows.push(serde_json::from_str::<Line>(line).with_context(|| {
                        format!(
                            "line {}: a JSON object like {{\"peer\", \"coll\", \"ranks\", \"bytes\", \"busbw_GBs\"}} is expected, \
                             or one document with \"rows\" or \"results\"",
                            i + 1
                        )
                    })?);
                }
                rows
            }
        };
        let held = rows.iter().filter_map(|r| r.ranks.or(r.threads)).collect();
        Ok((rows.iter().filter(|r| self.line(r, ranks)).count(), held))
    }

    fn line(&mut self, row: &Line, ranks: usize) -> bool {
        let Some(bytes) = row.bytes else { return false };
        let n = ranks as u64;
        if let (Some(peer), Some(coll), Some(bus)) = (&row.peer, &row.coll, row.busbw)
            && row.ranks == Some(n)
            && let Ok(op) = collective::parse(coll)
        {
            return self.keep(op, LineKind::Other, peer, bytes, bus);
        }
        if let (Some(limit), Some(us)) = (&row.limit, row.lat_us)
            && row.threads == Some(n)
            && matches!(&limit[..], "allreduce_touch" | "allreduce_stage")
        {
            let (_, bus) = collective::bandwidth(Op::AllReduce, bytes, ranks, us);
            return self.keep(Op::AllReduce, LineKind::Limit, &format!("limit: {limit}"), bytes, bus);
        }
        false
    }

    fn report_row(&mut self, row: &ReportRow, name: &str) -> bool {
        collective::parse(&row.collective)
            .is_ok_and(|op| self.keep(op, LineKind::Other, name, row.bytes, row.busbw_gbps))
    }

    /// Keeps the best of several launches.
    fn keep(&mut self, op: Op, kind: LineKind, name: &str, bytes: u64, bus: f64) -> bool {
        let usable = bytes > 0 && bus.is_finite() && bus >= 0.0;
        if usable {
            let points = self.0.entry((op as u8, kind, name.to_string())).or_default();
            let best = points.entry(bytes).or_insert(bus);
            *best = best.max(bus);
        }
        usable
    }

    /// The lines for one collective, limits first.
    fn of(&self, op: Op) -> impl Iterator<Item = Series> + '_ {
        let mine = self.0.iter().filter(move |((o, ..), _)| *o == op as u8);
        mine.map(|((_, kind, name), points)| Series {
            name: name.clone(),
            kind: *kind,
            points: points.iter().map(|(b, g)| (*b, *g)).collect(),
        })
    }
}

/// The panels for what was measured: (collective, its points), each beside what others reach.
pub fn panels(own: &str, measured: Vec<(Op, Vec<(u64, f64)>)>, others: &Others) -> Vec<Panel> {
    // A barrier has no size.
    let measured = measured.into_iter().filter(|(_, p)| p.iter().any(|(b, _)| *b > 0)).collect::<Vec<_>>();
    let line = |name: &str, points: &[(u64, f64)]| Series {
        name: name.into(),
        kind: LineKind::Own,
        points: points.iter().copied().filter(|(b, g)| *b > 0 && g.is_finite()).collect(),
    };
    if others.0.is_empty() {
        let series = measured.iter().map(|(op, p)| line(op.name(), p)).collect();
        return vec![Panel { title: format!("All collectives, {own}"), series }];
    }
    let panel = |(op, points): &(Op, Vec<(u64, f64)>)| {
        let mut series = vec![line(own, points)];
        series.extend(others.of(*op));
        series.truncate(MAX_SERIES);
        Panel { title: op.name().into(), series }
    };
    measured.iter().map(panel).collect()
}

/// The file that `path` means, links followed, and where it is written before it takes that name.
fn part_of(path: &Path) -> std::io::Result<(PathBuf, PathBuf)> {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let name = path.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
    let part = path.with_file_name(format!(".{}.{}.part", name.to_string_lossy(), std::process::id()));
    Ok((path, part))
}

/// Whether results can be written there: asked before anything is measured.
///
/// # Errors
/// Those of the system, with the name of the file.
pub fn can_write(path: &Path) -> anyhow::Result<()> {
    let tried = match std::fs::metadata(path) {
        // A pipe or a device: its reader would take the attempt for the results.
        Ok(m) if !m.is_file() && !m.is_dir() => return Ok(()),
        Ok(m) if m.is_dir() => Err(std::io::ErrorKind::IsADirectory.into()),
        _ => part_of(path).and_then(|(_, part)| std::fs::File::create(&part).and_then(|_| std::fs::remove_file(part))),
    };
    tried.with_context(|| format!("writing {}", path.display()))
}

/// Writes a file so that whoever reads it sees the old one or the new one, whole.
///
/// # Errors
/// Those of the system, with the name of the file.
pub fn write_whole(path: &Path, text: &str) -> anyhow::Result<()> {
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
        // A pipe or a device is written to, not replaced.
        return std::fs::write(path, text).with_context(|| format!("writing {}", path.display()));
    }
    let (path, part) = part_of(path).with_context(|| format!("writing {}", path.display()))?;
    let write = || {
        let mut file = std::fs::File::create(&part)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&part, &path)
    };
    write().with_context(|| {
        // Nothing half-written is left beside the target.
        let _ = std::fs::remove_file(&part);
        format!("writing {}", path.display())
    })
}

/// `text` for the inside of an element or a quoted attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A name, cut to what fits and escaped.
fn named(text: &str) -> String {
    let mut cut: String = text.chars().take(MAX_NAME).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    escape(&cut)
}

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 52.0;
/// Least distance of two labels.
const LABEL: f64 = 15.0;

/// How values become positions.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
    log: bool,
}

impl Scale {
    fn x(&self, bytes: u64) -> f64 {
        let (from, to) = self.x;
        let share = if to > from { ((bytes as f64).log2() - from) / (to - from) } else { 0.5 };
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, gbps: f64) -> f64 {
        let (from, to) = self.y;
        let v = if self.log { gbps.max(f64::MIN_POSITIVE).log10() } else { gbps };
        let share = ((v - from) / (to - from)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    /// Positions and labels of the horizontal lines.
    fn y_ticks(&self) -> Vec<(f64, String)> {
        let (from, to) = self.y;
        if self.log {
            return (from.round() as i32..=to.round() as i32).map(|e| (10f64.powi(e), plain(10f64.powi(e)))).collect();
        }
        let step = nice(to / 6.0);
        (0..=(to / step).round() as u32).map(|i| f64::from(i) * step).map(|v| (v, plain(v))).collect()
    }
}

/// 1, 2 or 5 times a power of ten, not below `x`.
fn nice(x: f64) -> f64 {
    let unit = 10f64.powf(x.max(1e-12).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * unit).find(|v| *v >= x * 0.999).unwrap_or(10.0 * unit)
}

/// A number without needless digits.
fn plain(v: f64) -> String {
    let text = format!("{v:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Three significant digits.
fn digits(v: f64) -> String {
    match v {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v if v >= 0.001 => format!("{v:.3}"),
        0.0 => "0".into(),
        v => format!("{v:.1e}"),
    }
}

fn scale(panel: &Panel, log: bool) -> Scale {
    let points = || panel.series.iter().flat_map(|s| &s.points);
    let (mut least, mut most) = (u64::MAX, 1);
    points().for_each(|(b, _)| (least, most) = (least.min(*b), most.max(*b)));
    let top = points().map(|p| p.1).fold(0.0f64, f64::max).max(1e-9);
    let y = if log {
        let bottom = points().map(|p| p.1).filter(|g| *g > 0.0).fold(top, f64::min).max(top / 1e5);
        (bottom.log10().floor(), top.log10().ceil().max(bottom.log10().floor() + 1.0))
    } else {
        let step = nice(top / 6.0);
        (0.0, (top / step).ceil() * step)
    };
    Scale { x: ((least.min(most) as f64).log2(), (most as f64).log2()), y, log }
}

/// Class of a line: what it stands for, and its place among those of its kind.
fn class(series: &[Series], i: usize) -> String {
    let kind = series[i].kind;
    let nth = series[..i].iter().filter(|s| s.kind == kind).count();
    match kind {
        LineKind::Own => format!("own c{}", nth % 8),
        LineKind::Limit => format!("limit d{}", nth % 3),
        LineKind::Other => format!("other c{} d{}", 1 + nth % 7, nth / 7 % 3),
    }
}

/// One drawing of a panel; `log` is the kind of its y axis.
fn chart(out: &mut String, panel: &Panel, log: bool) {
    let s = scale(panel, log);
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let (which, axis) = if log { ("log", "logarithmic") } else { ("lin", "linear") };
    let _ = write!(
        out,
        "<div class=\"chart {which}\"><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"{}: bus bandwidth against message size, {axis}\">\n<g class=\"grid\">",
        escape(&panel.title)
    );
    for (v, label) in s.y_ticks() {
        let y = s.y(v);
        let _ = write!(out, "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let _ = write!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 8.0, y + 4.0);
    }
    let (first, last) = (s.x.0.ceil() as u32, s.x.1.floor() as u32);
    let every = ((last.saturating_sub(first)) / 11 + 1).max(1) as usize;
    for power in (first..=last.max(first)).step_by(every).filter(|p| *p < 64) {
        let x = s.x(1 << power);
        let _ =
            write!(out, "<line class=\"tick\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{}\"/>", bottom + 5.0);
        let label = size::short(1 << power);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 19.0);
    }
    let (middle, side) = ((LEFT + right) / 2.0, (TOP + bottom) / 2.0);
    let _ = writeln!(
        out,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">message size (bytes; K, M, G are powers of 1024)</text>\
         <text transform=\"translate(14 {side}) rotate(-90)\" text-anchor=\"middle\">bus bandwidth (GB/s)</text></g>",
        HEIGHT - 8.0
    );
    // What was measured now is drawn last, over the others.
    let mut order: Vec<usize> = (0..panel.series.len()).filter(|i| !panel.series[*i].points.is_empty()).collect();
    order.sort_by_key(|i| std::cmp::Reverse((panel.series[*i].kind, *i)));
    for i in &order {
        line(out, panel, *i, &s);
    }
    labels(out, panel, &order, &s);
    out.push_str("</svg></div>\n");
}

fn line(out: &mut String, panel: &Panel, i: usize, s: &Scale) {
    let series = &panel.series[i];
    let name = named(&series.name);
    let path: Vec<String> = series.points.iter().map(|(b, g)| format!("{:.1},{:.1}", s.x(*b), s.y(*g))).collect();
    let _ = write!(out, "<g class=\"{}\"><polyline points=\"{}\"/>", class(&panel.series, i), path.join(" "));
    for (b, g) in &series.points {
        let value = format!("{}: {} GB/s", size::short(*b), digits(*g));
        let _ = write!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" data-name=\"{name}\" data-value=\"{value}\"><title>{name}, {value}\
             </title></circle>",
            s.x(*b),
            s.y(*g)
        );
    }
    out.push_str("</g>\n");
}

/// Names at the right end of the lines, pushed apart where they would cover one another.
fn labels(out: &mut String, panel: &Panel, order: &[usize], s: &Scale) {
    let mut at: Vec<(f64, f64, usize)> =
        order.iter().filter_map(|i| panel.series[*i].points.last().map(|(b, g)| (s.y(*g), s.x(*b), *i))).collect();
    at.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut y: Vec<f64> = at.iter().map(|a| a.0).collect();
    for i in 1..y.len() {
        y[i] = y[i].max(y[i - 1] + LABEL);
    }
    // Those that were pushed out at the bottom push back.
    let mut most = HEIGHT - BOTTOM + 4.0;
    for y in y.iter_mut().rev() {
        *y = y.min(most);
        most = *y - LABEL;
    }
    let x = WIDTH - RIGHT + 10.0;
    for ((end_y, end_x, i), y) in at.iter().zip(&y) {
        let _ = writeln!(
            out,
            "<g class=\"label {}\"><line x1=\"{:.1}\" y1=\"{end_y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"/>\
             <text x=\"{x}\" y=\"{:.1}\">{}</text></g>",
            class(&panel.series, *i),
            end_x + 4.0,
            x - 3.0,
            y + 4.0,
            short_name(&panel.series[*i].name)
        );
    }
}

/// A name for the margin, which is narrow.
fn short_name(name: &str) -> String {
    let cut: String = name.chars().take(25).collect();
    if cut.len() < name.len() { escape(&cut) + "…" } else { escape(&cut) }
}

fn legend(out: &mut String, panel: &Panel) {
    out.push_str("<ul class=\"legend\">");
    for (i, series) in panel.series.iter().enumerate() {
        let _ = write!(
            out,
            "<li class=\"{}\"><svg viewBox=\"0 0 28 10\"><line x1=\"1\" x2=\"27\" y1=\"5\" y2=\"5\"/></svg>{}</li>",
            class(&panel.series, i),
            named(&series.name)
        );
    }
    out.push_str("</ul>\n");
}

fn table(out: &mut String, panel: &Panel) {
    let mut sizes: Vec<u64> = panel.series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    out.push_str("<div class=\"scroll\" tabindex=\"0\"><table><thead><tr><th scope=\"col\">size (B)</th>");
    for s in &panel.series {
        let _ = write!(out, "<th scope=\"col\">{}</th>", named(&s.name));
    }
    out.push_str("</tr></thead><tbody>\n");
    for bytes in sizes {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", size::short(bytes));
        for s in &panel.series {
            let cell = s.points.iter().find(|p| p.0 == bytes).map_or(String::new(), |p| digits(p.1));
            let _ = write!(out, "<td>{cell}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// The whole page. `about` says what was measured and how.
pub fn page(title: &str, about: &str, panels: &[Panel]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <title>{0}</title>\n<style>{STYLE}</style></head>\n<body><main>\n<h1>{0}</h1>\n<p>{1}</p>\n\
         <input type=\"radio\" name=\"y\" id=\"ylin\" checked><label for=\"ylin\">linear</label>\n\
         <input type=\"radio\" name=\"y\" id=\"ylog\"><label for=\"ylog\">logarithmic</label>\n",
        escape(title),
        escape(about)
    );
    for panel in panels {
        let _ = writeln!(out, "<section><h2>{}</h2>", escape(&panel.title));
        if panel.series.iter().all(|s| s.points.is_empty()) {
            out.push_str("<p>Nothing with a size was measured.</p></section>\n");
            continue;
        }
        legend(&mut out, panel);
        out.push_str("<div class=\"scroll\" tabindex=\"0\">");
        chart(&mut out, panel, false);
        chart(&mut out, panel, true);
        out.push_str("</div>\n<h3>Bus bandwidth in GB/s</h3>\n");
        table(&mut out, panel);
        out.push_str("</section>\n");
    }
    let _ = writeln!(out, "</main><div id=\"tip\" hidden></div>\n<script>{SCRIPT}</script></body></html>");
    out
}

const STYLE: &str = "
:root{color-scheme:light dark;--bg:#fff;--ink:#1a1d21;--soft:#5b636d;--grid:#e3e6ea;--card:#f6f7f9;
--c0:#0b57d0;--c1:#c2410c;--c2:#0f7b6c;--c3:#8a3ffc;--c4:#a16207;--c5:#be185d;--c6:#4d7c0f;--c7:#475569}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e8eaed;--soft:#a0a8b2;--grid:#2b3037;--card:#1d2127;
--c0:#7cb0ff;--c1:#ff9a62;--c2:#4fd1bd;--c3:#c4a1ff;--c4:#eac04a;--c5:#ff8fc0;--c6:#a6d75b;--c7:#b3bfce}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1020px;margin:0 auto;padding:20px 16px 48px}h1{font-size:22px;margin:0 0 4px}
h2{font-size:18px;margin:28px 0 4px}h3{font-size:14px;margin:14px 0 6px;color:var(--soft);font-weight:600}
p{margin:0 0 12px;color:var(--soft)}label{margin:0 14px 0 4px}
.scroll{overflow-x:auto}.chart svg{display:block;width:100%;min-width:640px;height:auto}
.log{display:none}#ylog:checked~section .log{display:block}#ylog:checked~section .lin{display:none}
.grid line{stroke:var(--grid)}.grid .tick{stroke:var(--soft)}svg text{font-size:12px;fill:var(--soft)}
.own{--w:2.6}.other{--w:1.5}.limit{--w:1.8}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.c6{--c:var(--c6)}.c7{--c:var(--c7)}.limit{--c:var(--soft)}
.d1{--d:7 4}.d2{--d:2 3}.limit.d0{--d:9 4}.limit.d1{--d:2 4}.limit.d2{--d:12 3 2 3}
polyline,.legend line{fill:none;stroke:var(--c);stroke-width:var(--w);stroke-dasharray:var(--d,none);stroke-linejoin:round}
circle{fill:var(--c);stroke:var(--bg);stroke-width:1}circle.on{r:6;stroke:var(--ink)}
.label line{stroke:var(--c);opacity:.45;stroke-dasharray:2 3}svg .label text{fill:var(--c)}svg .label.own text{font-weight:700}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:4px 0 8px;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{width:28px;height:10px;flex:none}.legend .own{font-weight:700}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{color:var(--soft);font-weight:600}tbody th{font-weight:600}tbody tr:hover{background:var(--card)}
#tip{position:fixed;pointer-events:none;background:var(--card);color:var(--ink);border:1px solid var(--grid);border-radius:6px;
padding:4px 8px;font-size:13px;max-width:90vw;box-shadow:0 2px 8px #0003}
";

/// Shows the value of the point that is nearest to the pointer. It reads what stands in the page, as text.
const SCRIPT: &str = "
const tip=document.getElementById('tip');let on=null;
const off=()=>{if(on)on.classList.remove('on');on=null;tip.hidden=true};
for(const svg of document.querySelectorAll('.chart svg')){const dots=[...svg.querySelectorAll('circle')];
svg.addEventListener('pointermove',e=>{let best=null,least=900;
for(const d of dots){const r=d.getBoundingClientRect(),x=r.x+r.width/2-e.clientX,y=r.y+r.height/2-e.clientY,q=x*x+y*y;
if(q<least){least=q;best=d}}
off();if(!best)return;on=best;best.classList.add('on');tip.textContent=best.dataset.name+', '+best.dataset.value;tip.hidden=false;
const r=best.getBoundingClientRect(),w=tip.offsetWidth;
tip.style.left=Math.max(4,Math.min(r.x+12,innerWidth-w-4))+'px';tip.style.top=Math.max(4,r.y-34)+'px'});
svg.addEventListener('pointerleave',off)}
";

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "</title><script>alert(1)</script>\"' onload=x & \u{7}";

    fn comparison() -> String {
        let hostile = serde_json::to_string(HOSTILE).unwrap();
        format!(
            "{{\"date\":\"d\",\"rows\":[\
             {{\"limit\":\"allreduce_touch\",\"threads\":4,\"bytes\":1024,\"lat_us\":1.0,\"GBs\":1.0}},\
             {{\"limit\":\"memcpy\",\"threads\":4,\"bytes\":1024,\"GBs\":9.0}},\
             {{\"peer\":\"a\",\"coll\":\"allreduce\",\"ranks\":4,\"bytes\":1024,\"rep\":0,\"busbw_GBs\":1.5}},\
             {{\"peer\":\"a\",\"coll\":\"allreduce\",\"ranks\":4,\"bytes\":1024,\"rep\":1,\"busbw_GBs\":2.5}},\
             {{\"peer\":\"a\",\"coll\":\"allreduce\",\"ranks\":2,\"bytes\":1024,\"busbw_GBs\":99.0}},\
             {{\"peer\":\"broken\",\"error\":\"exit 1\"}},\
             {{\"peer\":{hostile},\"coll\":\"allreduce\",\"ranks\":4,\"bytes\":8,\"busbw_GBs\":0.1}}]}}"
        )
    }

    fn others(text: &str, ranks: usize) -> Others {
        let mut o = Others::default();
        assert!(o.add(text, "stem", ranks).unwrap().0 > 0);
        o
    }

    #[test]
    fn results_of_these_ranks_are_kept_the_best_launch_of_each() {
        let o = others(&comparison(), 4);
        let lines: Vec<Series> = o.of(Op::AllReduce).collect();
        assert_eq!(lines.len(), 3);
        let limit = (lines[0].kind, &lines[0].name[..], &lines[0].points[..]);
        // 1024 bytes in 1 us are 1.024 GB/s, times 2(n-1)/n.
        assert_eq!(limit, (LineKind::Limit, "limit: allreduce_touch", &[(1024, 1.536)][..]));
        assert!(lines.iter().any(|l| l.name == "a" && l.points == [(1024, 2.5)]));
        assert_eq!(o.of(Op::AllGather).count(), 0);
        assert_eq!(Others::default().add(&comparison(), "stem", 3).unwrap(), (0, [2, 4].into()));
    }

    #[test]
    fn lines_and_reports_are_read_too() {
        let line = "{\"peer\":\"b\",\"coll\":\"all_to_all\",\"ranks\":2,\"bytes\":64,\"busbw_GBs\":3.0}\n\n";
        assert_eq!(others(&line.repeat(2), 2).of(Op::AllToAll).next().unwrap().points, [(64, 3.0)]);
        let report = "{\"program\":\"wccl\",\"ranks\":2,\"buffers\":\"host\",\"results\":[{\"collective\":\"all_gather\",\
                      \"bytes\":64,\"busbw_gbps\":3.0}]}";
        assert_eq!(others(report, 2).of(Op::AllGather).next().unwrap().name, "stem (host)");
        let e = format!("{:#}", Others::default().add("{\"peer\":\"b\"}\nnonsense\n", "stem", 2).unwrap_err());
        assert!(e.contains("line 2") && e.contains("\"busbw_GBs\""), "{e}");
        let e = Others::read(&["/no/such/results".into()], 2).unwrap_err();
        assert!(format!("{e:#}").contains("/no/such/results"));
    }

    fn drawn() -> String {
        let measured =
            vec![(Op::AllReduce, vec![(8, 0.01), (1024, 3.0), (1 << 20, 12.0)]), (Op::Barrier, vec![(0, 0.0)])];
        page("wccl <&>", HOSTILE, &panels("wccl hbm", measured, &others(&comparison(), 4)))
    }

    #[test]
    fn foreign_text_is_only_text() {
        let page = drawn();
        assert_eq!(page.matches("<script").count(), 1);
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(page.contains("&lt;script&gt;alert(1)") && !page.contains("alert(1)</script>"));
        // No attribute is ended by a foreign quote.
        assert!(!page.contains("\"' onload") && page.contains("&quot;&#39; onload"));
        assert!(!page.contains('\u{7}'));
        // One file, no network.
        for outside in ["http://", "https://", "url(", "@import", "src=", "href="] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn the_page_has_what_a_reader_needs() {
        let page = drawn();
        for words in [
            "bus bandwidth (GB/s)",
            "message size (bytes",
            "prefers-color-scheme:dark",
            "wccl hbm",
            "limit: allreduce_touch",
        ] {
            assert!(page.contains(words), "{words}");
        }
        // Both scales, each with all points; a barrier has none.
        assert_eq!(page.matches("<svg viewBox=\"0 0 920").count(), 2);
        assert_eq!(page.matches("<circle").count(), 2 * 6);
        assert!(page.contains("1M: 12.0 GB/s") && page.contains("<td>12.0</td>"));
        assert!(!page.contains("NaN") && !page.contains("inf"));
        let none = page_of_nothing();
        assert!(none.contains("Nothing with a size was measured."));
    }

    fn page_of_nothing() -> String {
        page("t", "a", &panels("wccl", vec![(Op::Barrier, vec![(0, 0.0)])], &Others::default()))
    }

    #[test]
    fn labels_do_not_cover_one_another() {
        let series = (0..MAX_SERIES)
            .map(|i| Series {
                name: format!("s{i}"),
                kind: LineKind::Other,
                points: vec![(8, 1.0), (64, 1.0 + i as f64 / 100.0)],
            })
            .collect();
        let panel = Panel { title: "t".into(), series };
        let mut out = String::new();
        labels(&mut out, &panel, &(0..MAX_SERIES).collect::<Vec<_>>(), &scale(&panel, false));
        let mut y: Vec<f64> = out
            .split("<text ")
            .skip(1)
            .map(|t| t.split("y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        y.sort_by(f64::total_cmp);
        assert!(y.windows(2).all(|w| w[1] - w[0] > LABEL - 0.2), "{y:?}");
        assert!(y[0] > 0.0 && y[y.len() - 1] < HEIGHT);
    }

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!([0.9, 1.1, 2.3, 7.0, 0.04].map(nice), [1.0, 2.0, 5.0, 10.0, 0.05]);
        assert_eq!([0.001, 20.0, 2.5].map(plain), ["0.001", "20", "2.5"]);
        assert_eq!(
            [123.4, 12.34, 1.234, 0.1234, 0.00012, 0.0].map(digits),
            ["123", "12.3", "1.23", "0.123", "1.2e-4", "0"]
        );
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let dir = std::env::temp_dir().join(format!("wccl-plot-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("p.html");
        write_whole(&path, "one").unwrap();
        write_whole(&path, "two").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        let e = format!("{:#}", write_whole(&dir.join("none").join("p.html"), "x").unwrap_err());
        assert!(e.contains("p.html"), "{e}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
